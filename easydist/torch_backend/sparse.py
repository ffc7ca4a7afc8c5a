"""The sum of sparse tensors: all ranks gather all indices and values, and add up those of one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from easydist.errors import DisagreementError
from easydist.torch_backend.rendezvous import NAME
from easydist.torch_backend.work import GroupWork, TensorList
from easydist.transport.reduce_op import ReduceOp


def add_up(
    tensor: torch.Tensor,
    op: ReduceOp,
    size: int,
    all_gather_single: Callable[[torch.Tensor, torch.Tensor], GroupWork],
    allgather: Callable[[Sequence[TensorList], TensorList], GroupWork],
) -> tuple[list[GroupWork], Callable[[], None]]:
    """Begin the sum.

    Args:
        tensor: A COO tensor, of one shape on all ranks, to which the sum is written.
        op: The reduction.
        size: The number of ranks.
        all_gather_single: The group's method.
        allgather: The group's method.

    Returns:
        The works to wait for, and the function that writes the sum afterwards.

    Raises:
        ValueError: The reduction is no sum, or the tensor no COO tensor.
        DisagreementError: The shapes differ. All ranks raise, and the group goes on.
    """
    if op is not ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce: {NAME} adds up sparse tensors alone, got {op} and {tensor.layout}")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    own = torch.tensor([*mine.shape, mine.sparse_dim(), len(values)], device="cpu")
    all_gather_single(sizes := own.new_empty(size, len(own)), own).wait()
    if (sizes[:, :-1] != sizes[0, :-1]).any():
        raise DisagreementError(f"all_reduce: the ranks' sparse tensors have shapes {sizes[:, :-2].tolist()}")
    every = [
        [part.new_empty(*part.shape[:dim], count, *part.shape[dim + 1 :]) for count in sizes[:, -1].tolist()]
        for part, dim in ((indices, 1), (values, 0))
    ]

    def write() -> None:
        parts = torch.cat(every[0], 1), torch.cat(every[1])
        total = torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False).coalesce()
        with torch.no_grad():  # detach() would be another tensor with the same indices and values for now
            tensor.copy_(total)

    return [allgather([to], [part]) for to, part in zip(every, (indices, values), strict=True)], write
