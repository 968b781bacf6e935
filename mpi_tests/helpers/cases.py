"""The cases that `make test` runs of the tests with ranks that have many; `make proof-sizes` runs all.

Each case of a test is tried on one of the test's numbers of ranks, in turn from the largest to the smallest.
"""

from __future__ import annotations

import re

RANKS = re.compile(r"(\d+)-ranks-?")
# Of tests with cases that take long, those in which this is found.
CASES = {
    "test_checkpoint.py::test_a_gpt_is_loaded_into_any_layout": "2-ranks",
    "test_corruption.py::test_checks_change_no_bit": "layout[345]",
    "test_experts.py::test_loss_and_every_gradient_are_the_plain_mixtures": "2-sequence|1-$",
    "test_gpu_mixes.py::test_every_mix_has_the_losses_of_one_rank": "bf16_sp|documents|dropout|experts|masters|pp_tp",
    "test_hashes.py::test_the_hash_is_that_of_one_rank_in_every_layout": "ranks-8|sequence_par|zb_v|ranks-1",
    "test_llama.py::test_loss_and_every_gradient_are_the_plain_models": "pp4|sp4",
    "test_optimizers.py::test_a_checkpoint_has_the_optimizers_states": "muon",
    "test_optimizers.py::test_muon_is_that_of_one_process": "tp 2, sp 2|groups|pp 2",
    "test_placement.py::test_training": "num_experts|muon|reproducible|document",
    "test_planted_bits.py::test_a_planted_fault_is_named_in_its_step": "rounding|batch",
    "test_precision_training.py::test_an_overflow_on_one_rank_skips_the_step_on_all": "autocast-1|float16-2|too-3",
    "test_precision_training.py::test_zero_in_each_precision": "pp|autocast|sent",
    "test_remains.py::test_a_run_goes_on_from_the_last_step_of_ranks_that_hold_it": "reproducible|pp|sp",
    "test_reproducible.py::test_layouts_of_other_kinds_drawn_at_random": "llama",
    "test_reproducible.py::test_other_models_dtypes_and_optimizers": "experts|bfloat16|muon",
    "test_reproducible.py::test_tensor_parallelism_in_tiles_of_bfloat16": "sequence",
    "test_reproducible.py::test_tensor_parallelism_in_tiles_with_zero": "sequence",
    "test_reproducible.py::test_tensor_parallelism_of_a_llama_in_tiles_and_stages": "sequence",
    "test_reproducible_sequences.py::test_kinds_in_a_ring": "documents|few columns",
    "test_reproducible_sequences.py::test_kinds_with_heads_exchanged": "llama$|few columns",
    "test_same_bits.py::test_pipelines_beside_accumulation": "1f1b|interleaved",
    "test_step_reads.py::test_nothing_is_read_in_a_step_of_any_layout": "sp|ZeRO 3",
    "test_torch_groups.py::test_programs_as_over_gloo": "ranks-(?!compiled)",
    "test_train.py::test_a_checkpoint_goes_on_in_any_layout": "same|stage 3|one",
    "test_train.py::test_a_run_with_weights_that_are_not_finite_ends_on_all_ranks": "tp|pp|ZeRO 3|16 bits",
    "test_train.py::test_layers_may_be_shared_as_stages": "tp 2",
    "test_training_report.py::test_every_wait_of_a_step_counts_once": "muon|ep|sequence|tp|ZeRO 3|accumulated",
    "test_training_report.py::test_the_kinds_of_a_step_are_all_of_it": "tp|ep",
    "test_zero.py::test_clipped_steps_are_those_of_plain_data_parallelism_bit_for_bit": "[13]$",
    "test_zero.py::test_split_layers_tied_and_recomputed": "True-2|False-3",
    "test_zero_pipeline.py::test_frozen_parameters_stay": "interleaved-3|zb_v-1|zb_h1-2|1f1b-3",
}


def name_of(item: str) -> str:
    return item.partition("[")[0].rpartition("/")[2]


def some_of(items: list[str]) -> list[str]:
    """Return some of a test's items.

    >>> some_of(["t.py::f[1-ranks-a]", "t.py::f[2-ranks-a]", "t.py::f[1-ranks-b]", "t.py::f[2-ranks-b]"])
    ['t.py::f[2-ranks-a]', 't.py::f[1-ranks-b]']
    >>> some_of(["t.py::f[1-ranks]", "t.py::f[2-ranks]"])  # it is one case
    ['t.py::f[1-ranks]', 't.py::f[2-ranks]']

    Raises: ValueError where the pattern of a test leaves none or all of its cases.
    """
    if pattern := CASES.get(name_of(items[0])):
        some = [item for item in items if re.search(pattern, item.partition("[")[2].removesuffix("]"))]
        if not 0 < len(some) < len(items):
            raise ValueError(f"{pattern} leaves {len(some)} of the {len(items)} cases of {name_of(items[0])}")
        items = some
    cases = [*dict.fromkeys(RANKS.sub("", item) for item in items)]
    sizes = sorted({size_of(item) for item in items}, reverse=True)
    if len(cases) == 1:
        return items
    return [item for item in items if size_of(item) == sizes[cases.index(RANKS.sub("", item)) % len(sizes)]]


def size_of(item: str) -> int:
    """Return the number of ranks in an item's name, or 0."""
    return int(match[1]) if (match := RANKS.search(item)) else 0
