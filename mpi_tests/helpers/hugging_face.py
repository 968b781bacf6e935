"""GPT-2 and the kin of Llama in NumPy, after Hugging Face's implementations."""

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


def rope_of(config, kind):
    """Return the settings of rotations for a kind of layers, from an entry of transformers 5 or several of 4."""
    if rope := config.get("rope_parameters"):
        return rope.get(kind, rope)
    if kind == "sliding_attention" and "rope_local_base_freq" in config:
        return {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {"rope_type": "default", "rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}


def speeds_of(rope, size):
    """Return the rotary frequencies of a head, and the factor of its rotations.  Source: modeling_rope_utils.py."""
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor")
    speeds = theta ** -(np.arange(0, size, 2) / size)
    if kind == "llama3":
        names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        return llama3_speeds(speeds, kind, factor, *(rope[name] for name in names)), 1.0
    if kind == "linear":
        return speeds / factor, 1.0
    if kind == "yarn":
        length = rope["original_max_position_embeddings"]
        bounds = [size * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (32, 1)]
        low, high = max(np.floor(bounds[0]), 0), min(np.ceil(bounds[1]), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
        return speeds / factor * ramp + speeds * (1 - ramp), 0.1 * np.log(factor) + 1
    assert kind == "default"
    return speeds, 1.0


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


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


class NumpyDecoder:
    """The decoders of Llama's kin in NumPy, from Hugging Face's tensors and settings.  Source: their modeling_*.py."""

    def __init__(self, tensors, config):
        self.w, self.config = {name: tensor.double().numpy() for name, tensor in tensors.items()}, config
        self.size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.is_gemma = config["model_type"].startswith("gemma")

    def logits(self, tokens):
        x = self.w["model.embed_tokens.weight"][tokens]  # (batch, seq, hidden_size)
        x = x * np.sqrt(x.shape[-1]) if self.is_gemma else x
        for number in range(self.config["num_hidden_layers"]):
            x = self.block(x, f"model.layers.{number}", number)
        tied = self.config["tie_word_embeddings"]
        return self.norm(x, "model.norm") @ self.w["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def block(self, x, name, number):
        y = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", number)
        mlp = self.experts if any("experts" in each for each in self.w) else self.mlp
        if not self.is_gemma:
            x = x + y
            return x + mlp(self.norm(x, f"{name}.post_attention_layernorm"), name)
        x = x + self.norm(y, f"{name}.post_attention_layernorm")
        y = mlp(self.norm(x, f"{name}.pre_feedforward_layernorm"), name)
        return x + self.norm(y, f"{name}.post_feedforward_layernorm")

    def norm(self, x, name):
        weight = self.w[f"{name}.weight"] + self.is_gemma
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def attention(self, x, name, number):
        config, seq = self.config, x.shape[1]
        kind = (config.get("layer_types") or ["full_attention"] * 99)[number]
        is_rotated = not config.get("no_rope_layers") or config["no_rope_layers"][number]
        speeds, factor = speeds_of(rope_of(config, kind), self.size)
        turns = factor * np.exp(1j * np.arange(seq)[:, None] * speeds) if is_rotated else 1  # (seq, size / 2)

        def heads(part, count, is_turned=True):
            y = self.linear(x, f"{name}.{part}_proj")
            y = np.stack(np.split(y, count, -1), 1)  # (batch, heads, seq, size)
            if is_turned and f"{name}.{part}_norm.weight" in self.w:
                y = self.norm(y, f"{name}.{part}_norm")
            if is_turned:
                z = (y[..., : self.size // 2] + 1j * y[..., self.size // 2 :]) * turns
                y = np.concatenate([z.real, z.imag], -1)
            return y.repeat(config["num_attention_heads"] // count, 1)

        q, k = heads("q", config["num_attention_heads"]), heads("k", config["num_key_value_heads"])
        v = heads("v", config["num_key_value_heads"], is_turned=False)
        scale = config.get("query_pre_attn_scalar", self.size) ** -0.5
        ago = np.arange(seq)[:, None] - np.arange(seq)
        everywhere = config["model_type"] in ("mistral", "mixtral", "qwen3_moe")
        window = config.get("sliding_window") if everywhere or kind == "sliding_attention" else None
        scores = np.where((ago >= 0) & (ago < (window or seq)), scale * q @ k.swapaxes(-1, -2), -np.inf)
        return self.linear(np.concatenate(list((softmax(scores) @ v).swapaxes(0, 1)), -1), f"{name}.o_proj")

    def mlp(self, x, name, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"):
        act = ACTIVATIONS[self.config.get("hidden_act") or self.config["hidden_activation"]]
        return self.linear(act(self.linear(x, f"{name}.{gate}")) * self.linear(x, f"{name}.{up}"), f"{name}.{down}")

    def experts(self, x, name):
        """Compute all experts of all tokens, and weigh those chosen."""
        is_mixtral = self.config["model_type"] == "mixtral"
        part, names = (
            ("block_sparse_moe", ("w1", "w3", "w2")) if is_mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
        )
        p = softmax(self.linear(x, f"{name}.{part}.gate"))
        chosen = p >= np.sort(p, -1)[..., -self.config["num_experts_per_tok"], None]
        weights = np.where(chosen, p, 0)
        if is_mixtral or self.config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdims=True)
        each = [self.mlp(x, f"{name}.{part}.experts.{number}", *names) for number in range(p.shape[-1])]
        return sum(weights[..., number, None] * y for number, y in enumerate(each))
