"""The pages of docs/architecture, against what runs."""

import re
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, launch


@pytest.mark.shares_cores
def test_a_call_enters_as_many_files_as_the_page_says():
    output = launch(2, sys.executable, "-m", "mpi_tests.helpers.files_entered").stdout
    entered = re.findall(r"all-reduce enters (\d+) files", output)
    page = (ROOT / "docs/architecture/all_reduce.md").read_text()
    on_page = re.search(r"enters (\d+) files of .*?\n.*? enters (\d+), and a later one (\d+)\.", page)
    assert entered == [*on_page.groups()]
    times = re.findall(r"  runtime/dispatch.py (\d+)", output)
    assert times == ["1", "1", "1"]


@pytest.mark.shares_cores
def test_a_gradient_crosses_as_many_files_as_the_page_says():
    """Those of collectives/ depend on whether a rank has to wait."""
    output = launch(2, sys.executable, "-m", "mpi_tests.helpers.files_of_gradient").stdout
    (total,) = re.findall(r"a gradient crosses (\d+) files", output)
    own = re.findall(r"  ((?:parallelism|training)/\S+) \d+", output)
    on_page = re.search(r"crosses (\d+) files of `parallelism/`", (ROOT / "docs/architecture/gradient.md").read_text())
    assert len(own) == int(on_page[1])
    assert {"parallelism/data/averaging.py", "parallelism/data/buckets.py"} <= {*own}
    assert int(total) <= 16
