"""What describes a model beside its sizes and settings; `models.config` says what each word means."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from collectives.job.settings import Range, check, nearest
from parallelism.planner import ranges

LAYERS = ("full", "window", "unrotated")
FACTORS = Range(0, 10**6, open="above")


def choice(*choices: str) -> Any:
    """Return a field of which the first choice is the default."""
    return field(default=choices[0], metadata={"choices": choices})


def number(valid: Range, default: float | None = None) -> Any:
    return field(default=default, metadata={"range": valid})


@dataclass(frozen=True)
class Architecture:
    """The rest of a model's description; the defaults are a GPT-2's.

    Raises: ValueError for values of another type or out of range.
    """

    head_dim: int | None = number(ranges.WIDTH)
    scales_embedding: bool = False
    has_rms_norms: bool = False
    norm_offset: float = number(Range(0, 1), 0.0)
    norms: str = choice("before", "after", "around")
    has_qk_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    layers: str = "full"
    window: int | None = number(ranges.LENGTH)
    attention_scale: float | None = number(FACTORS)
    embeds_positions: bool = True
    local_rope_theta: float | None = number(FACTORS)
    rope_scaling: str = choice("llama3", "linear", "yarn")
    is_gated: bool = False
    activation: str = choice("gelu_tanh", "gelu", "silu", "relu")
    router: str = choice("sigmoid", "softmax")
    normalizes_choices: bool = True

    def __post_init__(self):
        check(self)
        for kind in self.layers.split() or [self.layers]:
            if kind not in LAYERS:
                raise ValueError(f"layers={self.layers!r} has {kind!r}{nearest(kind, LAYERS)}: use {', '.join(LAYERS)}")
        if "window" in self.layers.split() and self.window is None:
            raise ValueError(f"layers={self.layers!r} need a window: set window to its tokens")


ARCHITECTURE = asdict(Architecture())


def read_architecture(text: str | None) -> dict[str, Any]:
    """Return what a JSON object in text says of a model's architecture.

    >>> read_architecture('{"window": 64, "layers": "window full"}')
    {'window': 64, 'layers': 'window full'}

    Raises: ValueError for other text, and unknown names.
    """
    try:
        values = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"architecture={text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"architecture={text!r} must be a JSON object, " + 'such as {"head_dim": 64}')
    for name in values:
        if name not in ARCHITECTURE:
            names = ", ".join(each.name for each in fields(Architecture))
            raise ValueError(
                f"architecture={text!r}: {name} is unknown{nearest(name, ARCHITECTURE)}; there are {names}"
            )
    return values
