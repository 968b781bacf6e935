"""The expected content of `python -m teaching.page`, from the prover's symbolic runs of the first rounds.

python -m mpi_tests.helpers.page

Draws docs/page.png, the picture of the page on the home page and in the guide; needs Chromium and Selenium.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from collectives.algorithms import Access, Algorithm
from collectives.schedule.moves import even_runs
from collectives.schedule.proof import Rerun, World, before, contributions
from collectives.schedule.spec import COLLECTIVES, Chunks
from mpi_tests.helpers.launch import ROOT
from teaching.page.assemble import page
from teaching.page.scenes import scenes

NOTHING = "-1"


class AnyResult(World):
    """A symbolic run that may end in the middle of a schedule, as it accepts any result."""

    def check_result(self, rank: int) -> None:
        pass

    def rerun(self, rank: int) -> None:
        pass


def nodes(size: int, hosts: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, even_runs(size, hosts)))


def runs(row: Algorithm) -> Iterator[tuple[int, int]]:
    """Yield numbers of ranks, from 1 to 16, and of hosts on which an algorithm's states depend."""
    for size in range(1, 17):
        if row.precondition.holds(size, True):
            least_on_host = 2 if row.access else 1
            every = [1, *(hosts for hosts in (2, 4, 8) if row.over_nodes and size // hosts)]
            for hosts in every:
                if hosts == 1 or size > hosts * (least_on_host - 1):
                    yield size, hosts


def prover_states(row: Algorithm, size: int, hosts: int) -> list[str]:
    """Return all ranks' vectors as text, before the first round and after each; each is a run of so many rounds."""
    spec = COLLECTIVES[row.collective]
    programs: list[Any] = [row.rounds(rank, size, 0, nodes(size, hosts)) for rank in range(size)]
    states = []
    for count in range(len(programs[0]) + 1):
        start = [before(spec, rank, size, 0, row.num_chunks(size, nodes(size, hosts))) for rank in range(size)]
        cut = [[*rounds[:count], *[(Rerun(),)] * (row.access > Access.MESSAGES)] for rounds in programs]
        world = AnyResult(row.name, cut, start, [{} for _ in range(size)], in_order=False)
        world.run()
        states.append(";".join(vector_text(world, rank, spec.gives is Chunks.NONE) for rank in range(size)))
    return states


def vector_text(world: World, rank: int, is_barrier: bool) -> str:
    """Return each chunk's value in the page's encoding: 2^16 times the chunk modulo p, plus a bit for each rank."""
    if is_barrier:
        return str(world.heard[rank])
    vector = world.vectors[rank]
    return " ".join(
        value_text(vector[chunk], len(world.vectors)) if chunk in vector else NOTHING
        for chunk in range(max(vector, default=-1) + 1)
    )


def value_text(value: Any, size: int) -> str:
    ranks = [rank for rank in range(16) if value.ranks >> 16 * rank & 0xFFFF]
    assert value.ranks == contributions(tuple(ranks)), f"{value} has a rank twice"
    return str(value.chunk % size << 16 | sum(1 << rank for rank in ranks))


def picture(out: Path) -> None:
    """Take a screenshot of a ring all-reduce after two rounds."""
    from PIL import Image

    from mpi_tests.helpers.browser import browser

    with TemporaryDirectory() as folder, browser(1280, 800) as driver:
        (Path(folder) / "page.html").write_text(page(scenes()), encoding="utf-8")
        choice = "scene=collectives&collective=all_reduce&algorithm=ring&ranks=4&hosts=1&step=2"
        driver.get(f"{(Path(folder) / 'page.html').as_uri()}#{choice}")
        while driver.execute_script("return document.body.dataset.shown") != f"#{choice}":
            time.sleep(0.1)
        time.sleep(1)  # until the arrows are drawn
        Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB").quantize(128).save(out, optimize=True)


if __name__ == "__main__":
    picture(ROOT / "docs" / "page.png")
