"""Parallel layouts: divisions of a job's ranks and samples, and the check that a model allows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from parallelism.mesh import AXES, divisors
from parallelism.numerics.precision import ElementBytes, Precision
from parallelism.pipeline.schedule.registry import REGISTRY
from parallelism.planner.presets import shape_of
from parallelism.planner.shape import KernelKinds, ModelShape
from parallelism.sequence.token_shards import check_between_layers, check_heads, head_ranks_of, shard_tokens

# naive runs one stage at a time; gpipe takes as long as 1f1b and needs more memory.
SCHEDULES = [name for name in REGISTRY if name not in ("naive", "gpipe")]
RECOMPUTE = ("none", "selective", "full")
ZERO_GROUPS = ("all", "node")
BALANCES = ("counted", "measured", "layers")
MOST_VIRTUAL_STAGES = 8
INTEGER_BYTES = 8  # of a gradient in `parallelism.numerics.exact`


class ParallelLayout(NamedTuple):
    """A parallel layout; the fields are named as train.py's flags."""

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero_stage: int = 0
    zero_group: str = "all"
    recompute: str = "none"
    micro_batch_size: int = 1
    num_micro_batches: int = 1

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def __str__(self) -> str:
        """Format the layout as train.py's flags, without those that have no effect."""
        flags = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        if self.pp > 1:
            flags["schedule"] = self.schedule
        words = [name if value is True else f"{name} {value}" for name, value in flags.items()]
        return " ".join(words) or "one rank"


class TrainingJob(NamedTuple):
    """A training job: the model, the samples per step, and settings that are independent of the layout."""

    model: ModelShape
    global_batch_size: int
    dtype: str = "float32"
    master_weights: bool = False
    grad_dtype: str | None = None
    bucket_mb: float = 4.0
    sp_mode: str = "ring"
    sp_order: str = "zigzag"
    sp_heads: int | None = None
    optimizer: str = "adamw"
    reproducible: bool = False
    kernels: KernelKinds = KernelKinds()
    balance: str = "counted"

    @classmethod
    def of(cls, settings: Any, vocab_size: int, global_batch_size: int) -> TrainingJob:
        """Return the job of train.py's or the planner's settings."""
        rest = {name: getattr(settings, name) for name in cls._fields[2:] if hasattr(settings, name)}
        return cls(shape_of(settings, vocab_size), global_batch_size, **rest)

    @property
    def precision(self) -> ElementBytes:
        return element_bytes(self.dtype, self.master_weights, self.grad_dtype, self.reproducible)

    @property
    def num_layers(self) -> int:
        """The number of layers of which each may be a stage: blocks, or also the embedding and the head."""
        return self.model.n_layer + 2 * (self.balance == "layers")

    def head_ranks(self, sp: int) -> int:
        return head_ranks_of(self.sp_mode, sp, self.sp_heads)


@lru_cache(maxsize=64)
def element_bytes(dtype: str, master_weights: bool, grad_dtype: str | None, reproducible: bool) -> ElementBytes:
    plain = Precision(dtype, master_weights, grad_dtype).element_bytes
    return plain._replace(gradient=INTEGER_BYTES) if reproducible else plain


def meshes(world_size: int, fixed: Mapping[str, Any], num_experts: int = 0) -> Iterator[ParallelLayout]:
    """Yield all axis lengths that multiply to the number of ranks and agree with `fixed`.

    ep, which divides the experts, if there are any, is nested in dp.
    """
    for pp, sp, tp in product(divisors(world_size), repeat=3):
        dp, rest = divmod(world_size, pp * sp * tp)
        if rest:
            continue
        for ep in divisors(gcd(dp, num_experts)) if num_experts else (1,):
            lengths = dp, pp, sp, tp, ep
            if all(fixed.get(axis, n) == n for axis, n in zip((*AXES, "ep"), lengths, strict=True)):
                yield ParallelLayout(*lengths)


def families(job: TrainingJob, mesh: ParallelLayout, fixed: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    """Yield the layouts of a mesh, all without ZeRO."""
    sequences = (False, True) if mesh.tp > 1 else (False,)
    samples = job.global_batch_size // mesh.dp
    sizes = [size for size in divisors(samples) if size & (size - 1) == 0]
    choices = {"sequence_parallel": sequences, "recompute": RECOMPUTE, "micro_batch_size": sizes}
    for values in product(*((fixed[name],) if name in fixed else each for name, each in choices.items())):
        layout = mesh._replace(**dict(zip(choices, values, strict=True)))
        layout = layout._replace(num_micro_batches=samples // layout.micro_batch_size)
        for schedule, virtual_stages in schedules(job, mesh.pp, fixed):
            yield layout._replace(schedule=schedule, virtual_stages=virtual_stages)


def schedules(job: TrainingJob, pp: int, fixed: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield schedules and their stages per rank: the fewest, more that divide the layers evenly, or powers of two."""
    if pp == 1:
        yield "1f1b", 1
        return
    for name in [fixed["schedule"]] if "schedule" in fixed else SCHEDULES:
        row = REGISTRY[name]
        most = MOST_VIRTUAL_STAGES if row.more else row.virtual_stages
        more = range(row.virtual_stages + 1, min(most, job.num_layers // pp) + 1)
        tried = [number for number in more if job.num_layers % (pp * number) == 0 or number & (number - 1) == 0]
        for virtual_stages in [row.virtual_stages, *tried]:
            if fixed.get("virtual_stages", virtual_stages) == virtual_stages:
                yield name, virtual_stages


def check_mesh(job: TrainingJob, mesh: ParallelLayout) -> None:
    """Raise ValueError if the mesh cannot divide the model or the batch."""
    model, tp = job.model, mesh.tp
    if job.global_batch_size % mesh.dp:
        least = mesh.dp * -(-job.global_batch_size // mesh.dp)
        raise ValueError(f"global_batch_size={job.global_batch_size} is not divisible by dp={mesh.dp}: use {least}")
    if model.n_head % tp or model.num_kv_heads % tp:
        raise ValueError(f"n_head={model.n_head} and n_kv_head={model.num_kv_heads} must both be divisible by tp={tp}")
    if model.hidden_width % tp:
        raise ValueError(f"n_hidden={model.hidden_width} is not divisible by tp={tp}")
    check_heads(model.n_head // tp, model.num_kv_heads // tp, job.head_ranks(mesh.sp))
    shard_tokens(model.block_size, mesh.sp, job.sp_mode, job.sp_order, job.sp_heads)
    check_stages(job, mesh)


def check_layout(job: TrainingJob, layout: ParallelLayout) -> None:
    """Raise ValueError if a layout with a valid mesh is impossible."""
    if layout.sequence_parallel:
        check_between_layers(job.model.block_size, layout.sp, layout.tp)
    samples = job.global_batch_size // layout.dp
    if samples % layout.micro_batch_size:
        raise ValueError(f"{samples} samples of dp={layout.dp} can't be in micro-batches of {layout.micro_batch_size}")
    check_stages(job, layout)


def check_stages(job: TrainingJob, layout: ParallelLayout) -> None:
    if layout.num_stages > job.num_layers:
        raise ValueError(f"n_layer={job.model.n_layer} is fewer than {layout.num_stages} stages")
