"""GPT-2 in NumPy, after its description by Hugging Face."""

import numpy as np


def of_hugging_face(tensors, tokens, n_head=3):
    """Logits of a GPT-2 by NumPy, from tensors as Hugging Face has them.  Source: their modeling_gpt2.py."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def conv1d(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x, name):
        q, k, v = (np.stack(np.split(part, n_head, -1), 1) for part in np.split(conv1d(x, f"{name}.c_attn"), 3, -1))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])  # (batch, n_head, seq, seq)
        scores = np.exp(np.where(np.tri(len(tokens[0]), dtype=bool), scores, -np.inf))
        y = scores / scores.sum(-1, keepdims=True) @ v
        return conv1d(np.concatenate(list(y.swapaxes(0, 1)), -1), f"{name}.c_proj")

    def mlp(x, name):
        h = conv1d(x, f"{name}.c_fc")
        return conv1d(h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))), f"{name}.c_proj")

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens[0])]
    for block in ("transformer.h.0", "transformer.h.1"):
        x = x + attention(norm(x, f"{block}.ln_1"), f"{block}.attn")
        x = x + mlp(norm(x, f"{block}.ln_2"), f"{block}.mlp")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T
