"""Attributes that are made when they are first read, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Lazy(Generic[Value]):
    """An attribute that a method makes when it is first read.

    Up to Python 3.11 `functools.cached_property` holds one lock for all objects of a class meanwhile: a thread that
    waits for other ranks would keep a thread with another communicator from arriving where those wait for it.
    """

    def __init__(self, make: Callable[[Any], Value]):
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> Value:
        value = owner.__dict__[self.make.__name__] = self.make(owner)
        return value
