"""What rules for Open MPI's own collectives say."""

import doctest

from collectives import algorithms
from collectives.bench import openmpi_rules
from collectives.bench.documents import main
from collectives.bench.openmpi_rules import TARGETS, export
from collectives.tuning import Case, to_json
from mpi_tests.helpers.networks import ALL_REDUCE, tuning


def without_words(text):
    return [line.partition("#")[0].strip() for line in text.splitlines()]


def test_a_rule_holds_up_to_the_next():
    rules = export(tuning(ALL_REDUCE))
    sizes = ["0 4 0 0", "65 0 0 0", "129 6 0 0", "257 0 0 0"]
    assert without_words(rules.text) == ["1", "2", "3", "0", "1", "0 0 0 0", "4", "4", *sizes, "5", "1", "0 0 0 0"]
    assert rules.left_out == ["Allreduce on 4 ranks, 65 to 128 bytes: Open MPI has no two_shot"]


def test_numbers_of_ranks_that_follow_each_other():
    cases = {Case("all_to_all", "ordinary", ranks, 1): ((64, "bruck"),) for ranks in (3, 2)}
    lines = without_words(export(tuning(cases)).text)
    two, three = (["2", "0 3 0 0", "65 0 0 0"],) * 2
    assert lines == ["1", "3", "4", "0", "1", "0 0 0 0", "2", *two, "3", *three, "4", "1", "0 0 0 0"]


def test_the_example_of_spans():
    assert doctest.testmod(openmpi_rules) == (0, 1)


def test_a_chain_flows_in_chunks():
    rules = export(tuning({Case("broadcast", "ordinary", 3, 1): ((1000, "chain"),)}))
    assert "0 3 0 334" in rules.text.splitlines()


def test_reduce_scatter_is_two_collectives():
    rules = export(tuning({Case("reduce_scatter", "ordinary", 4, 1): ((64, "recursive_halving"), (128, "ring"))}))
    lines = without_words(rules.text)
    assert [lines[0], lines[1], lines[14]] == ["2", "12", "13"]
    assert (lines[8:11], lines[21:24]) == (["0 2 0 0", "65 3 0 0", "129 0 0 0"], ["0 3 0 0", "65 0 0 0", "129 0 0 0"])
    assert rules.left_out == ["Reduce_scatter_block on 4 ranks, 65 to 128 bytes: Open MPI has no ring"]


def test_where_some_ranks_do_not_know_the_size():
    one = export(tuning({Case("scatter", "ordinary", 4, 1): ((64, "binomial"),)}))
    assert without_words(one.text)[6:9] == ["4", "1", "0 2 0 0"]
    two = export(tuning({Case("gather", "ordinary", 4, 1): ((64, "binomial"), (128, "direct"))}))
    assert without_words(two.text) == ["0"]
    assert two.left_out == ["Gather on 4 ranks: binomial and direct by size, which only some ranks know"]


def test_rows_that_do_not_count():
    cases = {
        Case("barrier", "ordinary", 4, 1): ((0, "direct"),),
        Case("barrier", "ordinary", 4, 2): ((0, "dissemination"),),
        Case("all_gather", "symmetric", 4, 1): ((64, "ring"),),
    }
    rules = export(tuning(cases))
    assert without_words(rules.text)[:2] + without_words(rules.text)[6:9] == ["1", "6", "4", "1", "0 4 0 0"]
    assert rules.left_out == ["barrier on 4 ranks of 1 nodes: rules know no nodes, and those for 2 nodes are taken"]


def test_every_collective_has_its_target_and_every_name_is_ours():
    assert set(TARGETS) == {row.collective for row in algorithms.REGISTRY}
    for collective, targets in TARGETS.items():
        for target in targets:
            assert set(target.algorithms) <= set(algorithms.names(collective))


def test_the_command(tmp_path, capsys):
    source, dest = tmp_path / "tuning.json", tmp_path / "rules.txt"
    source.write_text(to_json(tuning(ALL_REDUCE)))
    assert main(["--tune-openmpi", str(dest), "--from", str(source)]) == 0
    flags = f"--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename {dest}"
    assert capsys.readouterr().out.splitlines() == [
        "left to Open MPI: Allreduce on 4 ranks, 65 to 128 bytes: Open MPI has no two_shot",
        f"Open MPI follows these rules under mpirun {flags}",
    ]
    assert sorted(tmp_path.iterdir()) == [dest, source]
    assert main(["--tune-openmpi", str(tmp_path / "none" / "rules.txt"), "--from", str(source)]) == 2
    assert "rules.txt can't be written (No such file or directory): pass another path" in capsys.readouterr().err
    source.write_text("{")
    assert main(["--tune-openmpi", str(dest), "--from", str(source)]) == 2
    assert "tuning.json: not JSON (" in capsys.readouterr().err
    assert main(["--tune-openmpi", str(dest), "--from", str(tmp_path / "none.json")]) == 2
    assert "none.json: can't be read (No such file or directory): check the path" in capsys.readouterr().err
