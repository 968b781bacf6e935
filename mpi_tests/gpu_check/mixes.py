"""Training runs in layouts of 4 ranks, each to be compared with one rank's run on the same batches."""

from __future__ import annotations

from typing import NamedTuple

RANKS = 4
BATCH = 8  # samples of a step
MODEL = "--n_layer 4 --n_head 4 --n_embd 64 --block_size 32 --warmup_iters 2 --eval_iters 1 --sample_tokens 1"
RTOL, BF16_RTOL = 1e-3, 2e-2  # of losses: sums in another order diverge over the updates
BF16 = "--dtype bfloat16"


class Mix(NamedTuple):
    """Flags of a layout, its number of data-parallel ranks and of micro-batches, and flags that one rank has, too.

    On a side stream, all work is on a stream of torch's that is not the default one.
    """

    layout: str
    dp: int = 1
    settings: str = ""
    num_micro_batches: int = 1
    on_side_stream: bool = False

    @property
    def is_compiled(self) -> bool:
        return "--compile" in self.layout

    @property
    def rtol(self) -> float:
        return BF16_RTOL if BF16 in self.settings else RTOL

    def words(self, size: int) -> list[str]:
        """Return the flags of a run on so many ranks: one, or all of the layout."""
        parts, layout = (1, "") if size == 1 else (self.num_micro_batches, self.layout)
        micro_batch_size = BATCH // parts // (1 if size == 1 else self.dp)
        batch = f"--micro_batch_size {micro_batch_size} --num_micro_batches {parts}"
        return f"{MODEL} {batch} {self.settings} {layout}".split()


# Those most likely to fail on a new GPU come first, and those that take long last.
MIXES = {
    "bf16_sp": Mix("--sp 2", 2, BF16),
    "autocast": Mix("", 4, BF16),
    "masters": Mix("--zero_stage 2", 4, f"{BF16} --master_weights"),
    "bf16_gradients": Mix("--zero_stage 1", 4, f"{BF16} --master_weights --grad_dtype bfloat16"),
    "side_stream": Mix("--zero_stage 1", 4, on_side_stream=True),
    "documents": Mix("--sp 2", 2, "--document_end 10"),
    "dropout": Mix("--tp 2", 2, "--dropout 0.1"),
    "experts": Mix("--ep 2", 4, "--num_experts 4"),
    "muon": Mix("--zero_stage 1", 4, "--optimizer muon"),
    "muon_tp": Mix("--tp 2", 2, "--optimizer muon"),
    "dp": Mix("", 4),
    "tp": Mix("--tp 4"),
    "sp_ulysses_tp": Mix("--tp 2 --sequence_parallel --sp 2 --sp_mode ulysses"),
    "sp_ring": Mix("--sp 2", 2),
    "pp_tp": Mix("--pp 2 --tp 2", num_micro_batches=2),
    "pp_zb_h1": Mix("--pp 4 --schedule zb_h1", num_micro_batches=4),
    "zero1": Mix("--zero_stage 1", 4),
    "zero2": Mix("--zero_stage 2", 4),
    "zero3": Mix("--zero_stage 3", 4),
    "pp_zero3_measured": Mix("--pp 2 --zero_stage 3 --balance measured", 2, num_micro_batches=2),
    "compile": Mix("--compile", 4),
    "compile_tp": Mix("--compile --tp 2", 2),
}
SMALL = ("bf16_sp", "tp")  # on the CPU, unless others are chosen
