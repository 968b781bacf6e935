"""What torch.compile must leave as it is."""

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch


def untraced(group: type) -> type:
    """Run a class's methods, and what they call, as they are: compiled code ends before and begins again after them.

    torch calls them from C++, from where its compiler goes into them as if they were the program's own.
    """
    for name, method in list(vars(group).items()):
        if isinstance(method, FunctionType):
            setattr(group, name, not_compiled(method))
    return group


def not_compiled(method: Callable) -> Callable:
    """Without the seconds that importing the compiler takes where nobody uses it."""
    disabled: list[Callable] = []

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*arguments, **named)

    return run
