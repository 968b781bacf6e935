"""GPT-2 and Llama in NumPy, after Hugging Face's implementations."""

import numpy as np


def gpt2_logits(tensors, tokens, n_head=3):
    """Compute the logits of a GPT-2 in NumPy from tensors in Hugging Face's format.  Source: their modeling_gpt2.py."""
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


def llama3_speeds(speeds, rope_type, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """Scale the rotary frequencies one by one by their wavelengths.  Source: their modeling_rope_utils.py."""
    assert rope_type == "llama3"
    length, scaled = original_max_position_embeddings, []
    for speed in speeds:
        wavelength = 2 * np.pi / speed
        if wavelength < length / high_freq_factor:
            scaled.append(speed)
        elif wavelength > length / low_freq_factor:
            scaled.append(speed / factor)
        else:
            smooth = (length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            scaled.append((1 - smooth) * speed / factor + smooth * speed)
    return np.array(scaled)


def llama_of_hugging_face(tensors, tokens, config):
    """Compute a Llama's logits in NumPy from Hugging Face's tensors and settings.  Source: their modeling_llama.py."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    n_head, n_kv_head = config["num_attention_heads"], config["num_key_value_heads"]
    seq, size = len(tokens[0]), config["hidden_size"] // n_head
    speeds = 1 / config["rope_theta"] ** (np.arange(0, size, 2) / size)
    if config["rope_scaling"]:
        speeds = llama3_speeds(speeds, **config["rope_scaling"])
    turns = np.exp(1j * np.arange(seq)[:, None] * speeds)  # (seq, size / 2)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def heads(x, name, number):
        return np.stack(np.split(x @ w[f"{name}.weight"].T, number, -1), 1)  # (batch, heads, seq, size)

    def turned(x):
        z = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turns
        return np.concatenate([z.real, z.imag], -1)

    def attention(x, name):
        q = turned(heads(x, f"{name}.q_proj", n_head))
        k = turned(heads(x, f"{name}.k_proj", n_kv_head)).repeat(n_head // n_kv_head, 1)
        v = heads(x, f"{name}.v_proj", n_kv_head).repeat(n_head // n_kv_head, 1)
        scores = np.exp(np.where(np.tri(seq, dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(size), -np.inf))
        y = scores / scores.sum(-1, keepdims=True) @ v
        return np.concatenate(list(y.swapaxes(0, 1)), -1) @ w[f"{name}.o_proj.weight"].T

    def mlp(x, name):
        gate, up = (x @ w[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.down_proj.weight"].T

    x = w["model.embed_tokens.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}"
        x = x + attention(norm(x, f"{block}.input_layernorm"), f"{block}.self_attn")
        x = x + mlp(norm(x, f"{block}.post_attention_layernorm"), f"{block}.mlp")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T
