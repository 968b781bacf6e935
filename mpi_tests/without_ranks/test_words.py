"""Tests of the glossary check: it reports planted names, messages, docstrings and pages, and nothing else."""

import pytest

from mpi_tests.helpers.house import PACKAGES
from mpi_tests.helpers.words import findings, main

PLANTED = {
    "def meet(a):\n    pass\n": "1: meet: say barrier",
    "class SendLetter:\n    pass\n": "1: SendLetter: say message, point to point",
    "def run():\n    num_meetings = 0\n": "2: num_meetings: say barrier",
    "for each in NCCLPulls, pushes:\n    SHMPush2 = each\n": "2: SHMPush2: say put",
    "def run():\n    puts = put_off_all = 0\n": "2: put_off_all: say defer",
    "last_said = 1\n": "1: last_said: say description, text",
    "num_shares = 1\n": "1: num_shares: say shards, fractions",
    "is_later = 1\n": "1: is_later: say deferred, following, ...",
    "def of_rank(a):\n    pass\n": "1: of_rank: say what the function returns",
    "own_place = 1\n": "1: own_place: say address, index, position, call site, ...",
    "class Run:\n    known: int\n": "2: known: say what the value is, not how it was obtained",
    "def add(a, *given):\n    pass\n": "1: given: say what the value is, not how it was obtained",
    "run.found = 1\n": "1: found: say what the value is, not how it was obtained",
    "def add(a):\n    found = a\n": "2: found: say what the value is, not how it was obtained",
    "for given in range(3):\n    pass\n": "1: given: say what the value is, not how it was obtained",
    "sizes = [len(kept) for kept in all_sizes]\n": "1: kept: say what the value is, not how it was obtained",
    "while made := start():\n    pass\n": "1: made: say what the value is, not how it was obtained",
    "with open(a) as (told, _):\n    pass\n": "1: told: say what the value is, not how it was obtained",
    "try:\n    pass\nexcept OSError as told:\n    pass\n": "3: told: say what the value is, not how it was obtained",
    "match a:\n    case [1, *asked]:\n        pass\n": "2: asked: say what the value is, not how it was obtained",
    "from a import b as known\n": "1: known: say what the value is, not how it was obtained",
    'raise ValueError(f"{x} is no array")\n': "1: is no a: say is not a",
    'raise ValueError(f"5 tokens can\'t be shared by {size} ranks")\n': "1: can't be shared: say is not divisible by",
    'print(f"rank {rank} was left out")\n': "1: was left out: say is missing, skipped",
    'def rank(x):\n    """The rank of x."""\n': "2: The: say what rank does, beginning with a verb",
    'def ranks(x):\n    """Of all nodes."""\n': "2: Of: say what ranks does, beginning with a verb",
}
RIGHT = '''"""What a module does goes on here."""

class Run:
    """A run that goes on."""

    @property
    def size(self):
        """The number of ranks."""
        known_ranks = [rank for rank in self.ranks if rank.known]
        run_in_place, OUT_OF_PLACE, placement, replaced = self.options
        return len(known_ranks) + self.push(made=1)

    @classmethod
    def of(cls, shared):
        """Make one; `put`, `off` and `put_officer` are words, and a variable may be `of_rank`."""
        put_officer, share_stream, of_rank = shared

    def start(self):
        """Start what goes on."""
        raise ValueError("there is no mpirun, and it is no longer running")

def test_what_is_asked():
    """What is asked is given."""
'''


def lines(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [str(finding) for finding in findings(tmp_path)]


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_package_is_read(tmp_path, folder):
    assert lines(tmp_path, f"{folder}/a.py", "fold = 1\n") == [f"{folder}/a.py:1: fold: say reduce, reduction"]


@pytest.mark.parametrize(("source", "line"), PLANTED.items())
def test_a_planted_word_is_named_in_a_line(tmp_path, source, line):
    assert lines(tmp_path, "collectives/a.py", source) == [f"collectives/a.py:{line}"]


def test_what_is_right_passes(tmp_path):
    assert lines(tmp_path, "collectives/a.py", RIGHT) == []


def test_pages_are_read_outside_of_their_code(tmp_path):
    page = "A run\n`goes on`\n```bash\necho it goes on\n```\ngoes on.\n"
    assert lines(tmp_path, "docs/a.md", page) == ["docs/a.md:6: goes on: say continues, resumes"]


def test_findings_are_a_failure(tmp_path, capsys):
    assert main(tmp_path) == 0
    assert lines(tmp_path, "a.md", "It goes on.\n")
    assert main(tmp_path) == 1
    assert capsys.readouterr().err == "a.md:1: goes on: say continues, resumes\n"
