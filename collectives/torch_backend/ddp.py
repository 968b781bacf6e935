"""The two places where DistributedDataParallel's C++ expects a backend that is written in C++, too."""

from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.nn import parallel

Reducer: Any = dist.Reducer  # to mypy, classes whose methods may be replaced
DistributedDataParallel: Any = parallel.DistributedDataParallel


def adapt_ddp() -> None:
    """Have DDP do with works and futures of Python what it does with those of C++."""
    hold_works_of_reducers()
    compress_in_python()


def hold_works_of_reducers() -> None:
    """Keep the work that `join` hands to a reducer: C++ keeps a part of it only, without our methods."""
    works: WeakKeyDictionary[Any, dist.Work] = WeakKeyDictionary()
    hand_over = Reducer._set_forward_pass_work_handle

    def hand_over_and_hold(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        works[reducer] = work
        hand_over(reducer, work, use_static_world_size)

    Reducer._set_forward_pass_work_handle = hand_over_and_hold


def compress_in_python() -> None:
    """Replace C++'s hook for compression, which refuses a future of Python, by torch's own in Python."""
    register = DistributedDataParallel._register_builtin_comm_hook

    @wraps(register)
    def register_hook(ddp: Any, kind: Any) -> None:
        if kind != dist.BuiltinCommHookType.FP16_COMPRESS or dist.get_backend(ddp.process_group) != "collectives":
            register(ddp, kind)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(ddp.process_group, fp16_compress_hook)

    DistributedDataParallel._register_builtin_comm_hook = register_hook
