"""ZeRO's stages compared with plain data parallelism, step by step, and the memory of each rank."""

import pytest

from parallelism.data.units import FlatParam, groups_of


def test_nodes_of_several_lengths_are_refused():
    with pytest.raises(ValueError, match="nodes have 2, 1 ranks"):
        groups_of("node", 3, [(0, 1), (2,)])
    assert groups_of("node", 4, [(0, 2), (1, 3)]) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_chunks_are_even_runs_of_lines_that_cover_a_unit(size):
    slices = {"a": slice(32, 35), "b": slice(48, 5149), "c": slice(5152, 5153)}
    unit = FlatParam.of(slices, 16, size)
    assert unit.span == slice(32, 5168)
    assert sum(unit.counts) == 5136
    assert all(count % 16 == 0 for count in unit.counts)
    assert max(unit.counts) - min(unit.counts) <= 16
    for name, param in slices.items():
        spans = [unit.cut(rank)[name][0] for rank in range(size) if name in unit.cut(rank)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(param.stop - param.start))
