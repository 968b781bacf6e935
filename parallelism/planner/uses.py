"""Settings that have an effect only beside another one, and the check that they have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from parallelism.planner.layout import ParallelLayout
from parallelism.planner.presets import EXPERTS, PRESETS


class Use(NamedTuple):
    """The setting on which it depends whether another one has an effect, with which values, and what to do."""

    other: str
    has_effect: Callable[[Any], bool]
    remedy: str

    @classmethod
    def of(cls, other: str, *values: str) -> Use:
        return cls(other, lambda value: value in values, f"set {other} to {' or '.join(values)}")


MIXTURE = Use("num_experts", bool, "set num_experts")
PIPELINE = Use("pp", lambda pp: pp > 1, "set pp to 2 or more")
SEQUENCES = Use("sp", lambda sp: sp > 1, "set sp to 2 or more")
# Rows of a setting and its use: it has an effect if it has one by all of its rows.
LAYOUT_USES = (
    *((name, MIXTURE) for name in ("experts_per_token", "expert_capacity", "balance_loss")),
    *((name, PIPELINE) for name in ("schedule", "virtual_stages", "balance")),
    *((name, SEQUENCES) for name in ("sp_mode", "sp_order", "sp_heads")),
    ("sp_order", Use.of("sp_mode", "ring", "hybrid")),
    ("zero_group", Use("zero_stage", bool, "set zero_stage to 1, 2 or 3")),
)


def check_uses(settings: Any, uses: Iterable[tuple[str, Use]] = LAYOUT_USES) -> None:
    """Raise ValueError for a setting of train.py or the planner that is changed from its default and has no effect."""
    own = {field.name: field.default for field in fields(settings)}
    by_model = {**EXPERTS, **PRESETS[settings.model].settings}
    refuse_unused(vars(settings), {**own, **ParallelLayout._field_defaults, **by_model}, uses)


def refuse_unused(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], uses: Iterable[tuple[str, Use]] = LAYOUT_USES
) -> None:
    """Raise ValueError for a setting without effect that is neither its default nor None, which is any value."""
    for name, use in uses:
        value, other = settings.get(name), settings.get(use.other)
        if value in (None, defaults.get(name)) or other is None or use.has_effect(other):
            continue
        beside = f"with {use.other}={other}" if other else f"without {use.other}"
        raise ValueError(f"{name}={value} has no effect {beside}: omit it, or {use.remedy}")
