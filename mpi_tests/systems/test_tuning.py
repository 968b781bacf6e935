"""The benchmark writes a tuning file, and scripts choose algorithms by it."""

import re
import shlex

import pytest

from collectives import algorithms
from collectives.graphs import read_links
from collectives.runtime.choose.auto import Case, parse_tuning
from collectives.schedule import simulate
from collectives.schedule.network import Network
from collectives.schedule.spec import COLLECTIVES
from mpi_tests import rig
from mpi_tests.helpers.documents import COMMANDS, run
from mpi_tests.helpers.launch import ROOT, launch, refusal

EXPLAIN = """
if comm.rank == 0:
    print(comm.explain("all_reduce", 1024))
"""
TINY = ("-b", "8", "-e", "1K", "-f", "128", "-n", "1", "-w", "0")


def rows(output: str) -> list[list[str]]:
    """Return collective, memory, bytes and algorithm of each line of the tables."""
    table, case = [], []
    for line in output.splitlines():
        if heading := re.fullmatch(r"# (?:(\w+), (\w+) memory|(barrier))", line):
            case = [heading[1], heading[2]] if heading[1] else ["barrier", "ordinary"]
        elif re.match(r" +\d", line):
            table.append([*case, line.split()[0], line.split()[9].rstrip("<*")])
    return table


def test_bench_tunes_and_a_script_follows(tmp_path):
    """Run the commands of the guide."""
    file, script = tmp_path / "tuning.json", tmp_path / "script.py"
    commands = dict.fromkeys(command.text for command in COMMANDS if "tuning.json" in command.text)
    measure, follow = (text.replace("tuning.json", shlex.quote(str(file))) for text in commands)
    result = run(f"{measure} {shlex.join(TINY)}")
    tuning = parse_tuning(file.read_text(), str(file))
    assert tuning.environment["ranks"] == 4
    assert {case[:3] for case in tuning.fastest} == {
        (collective, memory, 4)
        for collective in {row.collective for row in algorithms.REGISTRY}
        for memory in (("ordinary",) if collective == "barrier" else ("symmetric", "ordinary"))
    }
    for case, ladder in tuning.fastest.items():
        assert ladder[-1][0] == (0 if case.collective == "barrier" else 2048)
    # Of an algorithm with several variants, the best of this size is measured.
    measured = {(words[0], words[3].partition("/")[0]) for words in rows(result.stdout)}
    assert measured == {(row.collective, row.name) for row in algorithms.REGISTRY if row.precondition.holds(4, True)}
    assert sum(line.endswith("<") for line in result.stdout.splitlines()) == (len(COLLECTIVES) - 1) * 2 * 2 + 1
    assert tuning.network.between == Network().between  # not measurable on one node
    assert tuning.network.within != Network().within

    assert follow.endswith(" examples/sum.py")
    script.write_text((ROOT / "examples" / "sum.py").read_text() + EXPLAIN)
    output = run(follow.replace("examples/sum.py", shlex.quote(str(script)))).stdout
    assert "rank 3 of 4 has" in output
    algorithm = tuning.find(Case("all_reduce", "symmetric", 4, 1), 1024)
    assert re.search(f"^all_reduce .* on 4 ranks of 1 node: {algorithm}$", output, re.MULTILINE)
    assert f"measured to be the fastest ({file})" in output


def test_bench_keeps_to_what_it_is_told(tmp_path):
    flags = ("all_gather", "broadcast", *TINY, "--algorithms", "ring", "bruck", "mpi")
    result = launch(2, "python", "-m", "collectives.bench", *flags, "--tune", tmp_path / "t.json")
    assert result.returncode == 0, result.stderr
    assert [words for words in rows(result.stdout) if words[1] == "ordinary"] == [
        [*("all_gather", "ordinary"), nbytes, name] for nbytes in ("8", "1024") for name in ("ring", "bruck", "mpi")
    ] + [["broadcast", "ordinary", nbytes, "mpi"] for nbytes in ("8", "1024")]
    assert {case.collective for case in parse_tuning((tmp_path / "t.json").read_text(), "").fastest} == {"all_gather"}


def test_a_script_under_a_bad_file(tmp_path):
    result = launch(2, "python", "examples/sum.py", env={"COLLECTIVES_TUNING": str(tmp_path / "none.json")})
    assert refusal(result).endswith("none.json: can't be read (No such file or directory): check the path, or unset it")


def test_links_of_hosts_are_measured_and_followed(tmp_path, capsys):
    """Run the commands of the guide on four hosts, one with a slow port, and two with a slow link between them."""
    try:
        rig.refuse()
    except rig.UnavailableError as error:
        pytest.skip(str(error))
    file = tmp_path / "network.toml"
    measure, follow = (
        shlex.split(command.text.partition(" -n 8 ")[2]) for command in COMMANDS if "network.toml" in command.text
    )
    with rig.Rig(hosts=4, slots=2, rate="500mbit,500mbit,500mbit,100mbit", links=["1-3=50mbit"]) as hosts:
        result = hosts.launch(*(str(file) if word == file.name else word for word in measure))
        assert result.returncode == 0, result.stderr
        tuning = {"COLLECTIVES_TUNING": str(file)}
        assert "rank 7 of 8 has" in hosts.launch(*follow, env=tuning).stdout
        explain = "import collectives; comm = collectives.world(); print(comm.explain('all_reduce', 1 << 20))"
        assert f"not measured ({file})" in hosts.launch("python", "-c", explain, env=tuning).stdout
    graph = read_links(file)
    ports = {graph.names[link.source]: link.gb_per_s for link in graph.links if graph.names[link.dest] == "switch1"}
    assert ports == pytest.approx({"rig1": 0.0625, "rig2": 0.0625, "rig3": 0.0625, "rig4": 0.0125}, rel=0.4)
    (slow,) = [line for line in result.stdout.splitlines() if "which no switch explains" in line]
    assert slow.startswith("rig1 and rig3: 0.00")
    assert file.read_text().startswith(f"# {slow}\n")
    assert simulate.main(["all_reduce", "--topology", str(file), "-e", "1M"]) == 0
    assert "all_reduce on 8 ranks of 4 nodes: " in capsys.readouterr().out
