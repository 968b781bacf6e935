"""Prefetching: a thread prepares items, so that a step does not wait for its input."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
END: Any = object()


def ahead(items: Iterable[T], number: int = 2) -> Generator[T, None, None]:
    """Yield items; a thread prepares up to `number` of them in advance.

    An exception of theirs is raised in the item's place.  Closing the generator ends the thread.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, "input") as pool:
        try:
            coming = deque(pool.submit(next, source, END) for _ in range(number))
            while (item := coming.popleft().result()) is not END:
                coming.append(pool.submit(next, source, END))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)
