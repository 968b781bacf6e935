"""Prefetching: a thread prepares items, so that a step does not wait for its input."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 0.1  # interval at which a blocked thread checks whether the generator was closed


def ahead(items: Iterable[T], number: int = 2) -> Generator[T, None, None]:
    """Yield items; a thread prepares up to `number` of them in advance.

    An exception of theirs is raised in the item's place.  Closing the generator ends the thread.
    """
    ready: Queue[tuple[T | None, BaseException | None, bool]] = Queue(number)
    closed = Event()

    def put(item: T | None = None, error: BaseException | None = None, last: bool = False) -> None:
        while not closed.is_set():
            with suppress(Full):
                ready.put((item, error, last), timeout=LOOK_S)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if closed.is_set():
                    return
            put(last=True)
        except BaseException as error:
            put(error=error)

    thread = Thread(target=work, name="input", daemon=True)
    thread.start()
    try:
        while True:
            item, error, last = ready.get()
            if error:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        closed.set()
        thread.join()
