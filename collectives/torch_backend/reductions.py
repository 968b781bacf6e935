"""Reductions that take more than one call: sums of products with a factor, and of sparse tensors."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collectives.torch_backend.call import TorchCall
from collectives.torch_backend.work import Run

if TYPE_CHECKING:
    from collectives.torch_backend.runner import Runner

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse(dtype: torch.dtype) -> str:
    """Why there is no PREMUL_SUM of a dtype, or nothing."""
    return "" if dtype in FLOATS else f"op PREMUL_SUM of {dtype}: only floats are multiplied, so use SUM, or cast"


def sum_products(group: "Runner", call: TorchCall, options: Any, run: Run) -> None:
    """A sum to which each rank gives its tensors times a factor of its own; what it gives stays as it is."""
    factor = options.reduceOp.__getstate__()[1]  # as older torch has no name for it
    given = [(tensor.detach() * factor).to(tensor.dtype) for tensor in call.given]
    taken = call.taken if call.collective == "reduce_scatter" else given[: len(call.taken)]
    group.execute(replace(call, given=given, taken=taken), options, run)
    for target, source in zip(call.taken, taken, strict=True):
        if target is not source:
            target.detach().copy_(source)


def sum_sparse(group: "Runner", tensor: torch.Tensor, options: Any, place: tuple[str, int], run: Run) -> None:
    """A sum of tensors in coordinates: every rank gets all indices and values, and adds them up in order of ranks."""
    op, size = options.reduceOp.op, group.comm.size
    failure = "" if op == op.SUM else f"op {op.name} of a sparse tensor: use SUM, or pass tensor.to_dense()"
    mine = tensor.detach().coalesce()
    num_rows = torch.empty(size, dtype=torch.int64)
    shape = f"sparse {tuple(tensor.shape)} of {tensor.dtype} in {tensor.sparse_dim()} dimensions"
    call = TorchCall("all_gather", [torch.tensor([mine._nnz()])], [num_rows], failure=failure, note=shape, place=place)
    group.execute(call, options, run)

    def gathered(part: torch.Tensor) -> list[torch.Tensor]:
        """Of every rank, a part that has a row for each non-zero."""
        rows = [part.new_empty(count, *part.shape[1:]) for count in num_rows.tolist()]
        counts = tuple(x.numel() for x in rows)
        group.execute(
            TorchCall("all_gather", [part.contiguous()], rows, (("counts", counts),), place=place), options, run
        )
        return rows

    indices, values = torch.cat(gathered(mine.indices().t())).t(), torch.cat(gathered(mine.values()))
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
    with torch.no_grad():  # instead of detach(), whose indices would not be the tensor's
        tensor.copy_(total.coalesce())
