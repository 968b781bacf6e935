"""A collective as torch asks for it, in the communicator's words."""

import os
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, str(torch.__file__)))
Tensors = list[torch.Tensor]
Arguments = tuple[tuple[str, Any], ...]  # by name


@dataclass(slots=True)
class TorchCall:
    """`given` and `taken` are each one vector in pieces: what this rank gives, and where its result goes.

    `same` are the arguments in which ranks must agree; `own` those in which they may differ.
    """

    collective: str
    given: Tensors = field(default_factory=list)
    taken: Tensors = field(default_factory=list)
    same: Arguments = ()
    own: Arguments = ()
    failure: str = ""
    count: int = -1  # elements, where ranks must give as many
    note: str = ""  # what else ranks must agree in
    place: tuple[str, int] | None = None  # from where it is called

    @property
    def dtype(self) -> torch.dtype | None:
        tensors = self.given or self.taken
        return tensors[0].dtype if tensors else None

    @property
    def said(self) -> str:
        """What every rank must say."""
        words = [f"{self.count} elements"] * (self.count >= 0) + [str(self.dtype)] * (self.dtype is not None)
        words += [f"{name}={value}" for name, value in self.same] + [self.note] * bool(self.note)
        return f"{self.collective}({', '.join(words)})"

    @property
    def moves_only(self) -> bool:
        return self.collective not in REDUCTIONS

    def refuse(self) -> str:
        """Why it cannot be done, or nothing."""
        if self.failure:
            return self.failure
        tensors = self.given + self.taken
        if strange := [t.layout for t in tensors if t.layout != torch.strided]:
            return f"{self.collective}: tensor of layout {strange[0]}: pass tensor.to_dense()"
        if len({(t.dtype, t.device) for t in tensors}) > 1:
            kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
            return f"{self.collective}: tensors of {' and '.join(kinds)}: pass tensors of one dtype on one device"
        return ""


def caller(frame: FrameType) -> tuple[str, int]:
    """The innermost place, from a frame on, that is outside torch and this package."""
    while frame.f_code.co_filename.startswith(LIBRARIES) and frame.f_back:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
