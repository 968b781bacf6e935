"""A call as its caller makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.runtime.plan import run_now
from collectives.runtime.reports.call_log import CallSite
from collectives.schedule.spec import COLLECTIVES

OPTIONS = {name: spec.options for name, spec in COLLECTIVES.items()}
Runs = Callable[[Any], Any]  # of a plan


class Request(NamedTuple):
    """A call as its caller makes it."""

    collective: str
    x: Any
    out: Any
    options: tuple
    run: Runs = run_now
    note: str = ""
    call_site: CallSite | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        arguments = {"out": self.out} if "out" in COLLECTIVES[self.collective].takes else {}
        return arguments | dict(zip(OPTIONS[self.collective], self.options, strict=True))
