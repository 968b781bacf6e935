"""Rules between a description and config.json of Hugging Face: each reads and writes some of its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from collectives.job.settings import nearest
from models.config import ModelConfig

Values = Mapping[str, Any]  # of config.json
ACTIVATIONS = {
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
WINDOW = 4096  # transformers' default
LAYERS = {"full_attention": "full", "sliding_attention": "window"}
# Settings of scaled rotations: those that vary, by our names, and those with one value.
FACTOR = {"factor": "rope_factor"}
LENGTH = {"original_max_position_embeddings": "rope_original_length"}
SCALINGS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": (FACTOR, {}),
    "llama3": ({**FACTOR, **LENGTH}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "yarn": ({**FACTOR, **LENGTH}, {"beta_fast": 32, "beta_slow": 1, "truncate": True}),
}


class Rule(NamedTuple):
    """How some settings of a description are read from config.json, and written to it."""

    read: Callable[[Values], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


def size(theirs: str, ours: str, resolved: str | None = None, also: str = "") -> Rule:
    """Return the rule of a setting that a config.json must have, by this name or `also` another one.

    `resolved` is the attribute to write, by default the setting itself.
    """

    def read(values: Values) -> dict[str, Any]:
        name = theirs if theirs in values else also
        if name not in values:
            raise ValueError(f"no {theirs}; pass a folder with a model of Hugging Face")
        return {ours: values[name]}

    return Rule(read, lambda config: {theirs: getattr(config, resolved or ours)})


def option(theirs: str, default: Any, *ours: str) -> Rule:
    """Return the rule of a setting that has a default, of which several of ours have the value."""

    def read(values: Values) -> dict[str, Any]:
        value = values.get(theirs)
        return dict.fromkeys(ours, default if value is None else value)

    return Rule(read, lambda config: {theirs: getattr(config, ours[0])})


def constant(theirs: str, expected: Any) -> Rule:
    """Return the rule of a setting of which only one value can be loaded."""

    def read(values: Values) -> dict[str, Any]:
        if values.get(theirs, expected) != expected:
            raise ValueError(f"{theirs} is {values[theirs]!r}; only {expected!r} can be loaded")
        return {}

    return Rule(read, lambda config: {theirs: expected})


def activation(theirs: str, default: str) -> Rule:
    def read(values: Values) -> dict[str, Any]:
        return {"activation": meaning(theirs, values.get(theirs) or default, ACTIVATIONS)}

    def write(config: ModelConfig) -> dict[str, Any]:
        same = [name for name, ours in ACTIVATIONS.items() if ours == config.activation]
        return {theirs: default if default in same else same[0]}

    return Rule(read, write)


def meaning(theirs: str, value: Any, names: Mapping[str, Any]) -> Any:
    """Return what a name stands for.

    Raises: ValueError for an unknown one, with the nearest.
    """
    if value not in names:
        raise ValueError(f"{theirs} is {value!r}{nearest(str(value), names)}; only {', '.join(names)} can be loaded")
    return names[value]


def heads(default: int | None = None) -> Rule:
    """Return the rule of the heads of keys and values, and of a width of heads that may be one of its own."""

    def read(values: Values) -> dict[str, Any]:
        width, plain = values.get("head_dim") or default, values["hidden_size"] // (values["num_attention_heads"] or 1)
        return {"n_kv_head": values.get("num_key_value_heads"), "head_dim": None if width == plain else width}

    return Rule(read, lambda config: {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_size})


def rope(theta: float, local_theta: float | None = None) -> Rule:
    """Return the rule of rotations, with the default bases: of all layers, or of those without and with a window.

    transformers 5 keeps them in one entry, by kind of layers if there are two bases, and 4 in several.  All versions
    read what 4 has.
    """

    def read(values: Values) -> dict[str, Any]:
        name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        own = values.get(name) or {}
        if not isinstance(own, dict):
            raise ValueError(f"{name} is {own!r}; an object of settings is expected")
        local = {}
        if local_theta is not None:
            of_windows = own.get("sliding_attention") or {} if "full_attention" in own else {}
            own = own.get("full_attention", own) or {}
            meaning("rope_type of sliding_attention", of_windows.get("rope_type", "default"), {"default": None})
            base = of_windows.get("rope_theta", values.get("rope_local_base_freq"))
            local = {"local_rope_theta": local_theta if base is None else base}
        base = own.get("rope_theta", values.get("rope_theta"))
        return {"rope_theta": theta if base is None else base, **local, **read_scaling(name, own)}

    def write(config: ModelConfig) -> dict[str, Any]:
        local = {} if local_theta is None else {"rope_local_base_freq": config.local_rope_theta}
        return {"rope_theta": config.rope_theta, **local, "rope_scaling": scaling_entry(config)}

    return Rule(read, write)


def read_scaling(name: str, own: Values) -> dict[str, Any]:
    """Return the description of scaled rotations in an entry of this name."""
    kind = own.get("rope_type", own.get("type", "default"))
    fields, constants = meaning("rope_type", kind, SCALINGS)
    if kind == "default":
        return {}
    needed = fields if kind == "yarn" else {**fields, **constants}
    if missing := needed.keys() - own.keys():
        raise ValueError(f"{name} has no {min(missing)}; get the file again")
    if kind == "yarn":
        constants = {**constants, "attention_factor": 0.1 * math.log(own["factor"]) + 1}
        constants |= {"mscale": None, "mscale_all_dim": None}
    for setting, expected in constants.items():
        if own.get(setting) is not None and own[setting] != expected:
            raise ValueError(f"{setting} is {own[setting]!r}; only {expected!r} can be loaded")
    return {"rope_scaling": kind, **{ours: own[theirs] for theirs, ours in fields.items()}}


def scaling_entry(config: ModelConfig) -> dict[str, Any] | None:
    """Return config.json's entry for rope_factor."""
    if config.rope_factor == 1:
        return None
    fields, constants = SCALINGS[config.rope_scaling]
    own = {theirs: getattr(config, ours) for theirs, ours in fields.items()}
    return {"rope_type": config.rope_scaling, **constants, **own}


def newer_form(written: dict[str, Any]) -> dict[str, Any]:
    """Return written settings with those of rotations in one entry, as transformers 5 has them."""
    rest = {name: value for name, value in written.items() if not name.startswith("rope_")}
    full = {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": written["rope_theta"]}
    if "rope_local_base_freq" not in written:
        return {**rest, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": written["rope_local_base_freq"]}
    return {**rest, "rope_parameters": {"full_attention": full, "sliding_attention": local}}


def window_everywhere(default: int | None, switch: str | None = None) -> Rule:
    """Return the rule of a window that all layers have, if any; if there is a switch, it has to be on."""

    def read(values: Values) -> dict[str, Any]:
        window = values.get("sliding_window", default) if switch is None or values.get(switch) else None
        return {"layers": "full" if window is None else "window", "window": window}

    def write(config: ModelConfig) -> dict[str, Any]:
        window = config.window if config.layers == "window" else None
        return {**({} if switch is None else {switch: window is not None}), "sliding_window": window}

    return Rule(read, write)


def window_by_layer(default: Callable[[Values, int], bool], **settings: Any) -> Rule:
    """Return the rule of windows by layer: `layer_types`, or by default that of a layer's number.

    `settings` are written, too; with `use_sliding_window` among them, this is needed for a window.
    """

    def read(values: Values) -> dict[str, Any]:
        number, window = values["num_hidden_layers"], values.get("sliding_window", WINDOW)
        if "use_sliding_window" in settings and not values.get("use_sliding_window"):
            return {"layers": "full", "window": None}
        types = values.get("layer_types") or [
            "sliding_attention" if default(values, layer) else "full_attention" for layer in range(number)
        ]
        layers = pattern([meaning("layer_types", each, LAYERS) for each in layer_entries("layer_types", types, number)])
        return {"layers": layers, "window": window if "window" in layers.split() else None}

    def write(config: ModelConfig) -> dict[str, Any]:
        kinds = {ours: theirs for theirs, ours in LAYERS.items()}
        types = [kinds.get(kind, kind) for kind in config.layer_kinds]
        switch = {"use_sliding_window": config.window is not None} if "use_sliding_window" in settings else {}
        return {**settings, **switch, "sliding_window": config.window, "layer_types": types}

    return Rule(read, write)


def unrotated_layers(interval: int) -> Rule:
    """Return the rule of layers that have no rotations: by default each `interval`-th."""

    def read(values: Values) -> dict[str, Any]:
        number, each = values["num_hidden_layers"], values.get("no_rope_layer_interval") or interval
        flags = values.get("no_rope_layers") or [(layer + 1) % each != 0 for layer in range(number)]
        flags = layer_entries("no_rope_layers", flags, number)
        return {"layers": pattern(["full" if is_rotated else "unrotated" for is_rotated in flags])}

    def write(config: ModelConfig) -> dict[str, Any]:
        flags = [int(kind != "unrotated") for kind in config.layer_kinds]
        return {"no_rope_layers": flags, "layer_types": ["full_attention"] * len(flags)}

    return Rule(read, write)


def layer_entries(name: str, each: Any, number: int) -> list[Any]:
    """Return the entries of the first `number` layers; raise ValueError for fewer."""
    if not isinstance(each, list) or len(each) < number:
        raise ValueError(f"{name} is {each!r}; an entry for each of num_hidden_layers={number} is expected")
    return each[:number]


def pattern(kinds: list[str]) -> str:
    """Return the shortest pattern of kinds of layers that is repeated in a list.

    >>> pattern(["window", "full", "window", "full", "window"]), pattern(["full", "full"])
    ('window full', 'full')
    """
    repeats = (n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return " ".join(kinds[: next(repeats, 0)]) or "full"  # of no layers, which are refused later
