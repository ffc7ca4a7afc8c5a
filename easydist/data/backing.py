"""Tensors that have no memory behind them, or too little: the check before anyone uses raw addresses.

torch gives an address for many tensors that have no data there: ZeroTensors, fake, functional and wrapper tensors,
tensors whose storage was freed. Copying from such an address ends the process. So each leaf passes one of these
functions first: ``starts`` or ``addresses`` for many tensors at once, ``backed`` for one of any kind.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from easydist.base import torch_private
from easydist.base.torch_private import is_zerotensor
from easydist.base.wording import a_or_an

_storage_of = torch.Tensor.untyped_storage
_length_of = torch.UntypedStorage.nbytes
_address_of = torch.UntypedStorage.data_ptr
_offset_of = torch.Tensor.storage_offset
_PLAIN = torch.Tensor, torch.nn.Parameter
_LOST = "has lost its memory"

UNCOPIED = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"u?int[1-7]", str(dtype).removeprefix("torch."))
)
"""The dtypes of which torch can hold and view elements, but not copy any."""


def addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the address of each tensor; None if the memory of one does not hold all its elements.

    Args:
        tensors: Tensors of the class ``torch.Tensor`` or parameters.

    Cost: 0.3 µs for each tensor.
    """
    with contextlib.suppress(RuntimeError):  # a compressed sparse tensor has no strides
        if all(map(torch.Tensor.is_contiguous, tensors)):
            nbytes = [tensor.nbytes for tensor in tensors]
            if (found := starts(tensors, nbytes)) is not None:
                return found
    return [*map(torch.Tensor.data_ptr, tensors)] if all(map(is_backed, tensors)) else None


def starts(tensors: Sequence[torch.Tensor], nbytes: Sequence[int]) -> list[int] | None:
    """Return the addresses of contiguous tensors if they are at the start of their own memory, as most are.

    Args:
        tensors: Contiguous tensors of the class ``torch.Tensor``, or parameters.
        nbytes: The bytes of each.

    Returns:
        The addresses, possibly 0 for a tensor without elements; None if a tensor is not like that, or its memory is
        missing.

    Cost: 0.15 µs for each tensor.
    """
    try:
        storages = [*map(_storage_of, tensors)]
        found = [*map(_address_of, storages)]
    except RuntimeError:  # no storage, or one without memory
        return None
    if any(map(_offset_of, tensors)):
        return None
    if 0 in found and any(map(operator.gt, nbytes, found)):  # only a tensor without elements may have the address 0
        return None
    lengths = [*map(_length_of, storages)]
    return found if lengths == nbytes or all(map(operator.ge, lengths, nbytes)) else None


def is_backed(tensor: torch.Tensor) -> bool:
    """True if the memory of a dense tensor holds all its elements, or there are none.

    Example:
        >>> x = torch.ones(4)
        >>> first, later = x[:2], x[1:3]
        >>> is_backed(later), is_backed(torch._efficientzerotensor(4))
        (True, False)
        >>> _ = x.untyped_storage().resize_(8)
        >>> is_backed(x), is_backed(first), is_backed(later)
        (False, True, False)

    Cost: 0.3 µs.
    """
    if torch.compiler.is_compiling():  # what is traced has no memory yet
        return True
    try:
        if not (nbytes := tensor.nbytes):
            return True
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
    except RuntimeError:
        return False
    if not tensor.is_contiguous():
        nbytes = tensor.itemsize * (1 + sum(map(operator.mul, [n - 1 for n in tensor.shape], tensor.stride())))
    return base != 0 and tensor.data_ptr() - base + nbytes <= storage.nbytes()


def absence(tensor: torch.Tensor) -> str:
    """Return the reason why the values of a tensor are not in memory of its own, or not all; empty if they are.

    Example:
        >>> absence(torch.ones(2)), absence(torch.ones(2, device="meta"))
        ('', 'is a meta tensor, which has no data; pass a tensor with data')
    """
    with torch_private.DisableTorchFunctionSubclass():  # a subclass may give any answer
        return _absence(tensor)


def _absence(tensor: torch.Tensor) -> str:
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(tensor, dtensor.DTensor):
        return "is a DTensor; pass .full_tensor() or .to_local(), whichever is meant"
    if tensor.is_meta:
        return "is a meta tensor, which has no data; pass a tensor with data"
    if _is_unfinished(tensor):
        return f"is the result of a functional collective: call wait() of this {type(tensor).__name__} first"
    if is_lazy(tensor):
        return "is not initialized yet; run the module once before"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = (
            "nested"
            if tensor.is_nested
            else "quantized"
            if tensor.is_quantized
            else f"{tensor.layout} on {tensor.device}"
        )
        return f"is not a dense tensor ({kind}); pass its dense parts"
    if torch_private.tangent_of(tensor) is not None:
        return (
            "is a dual tensor of forward-mode autograd, and its tangent would be lost; pass its primal, "
            "forward_ad.unpack_dual(x).primal"
        )
    return "" if is_backed(tensor) and not _contains_others(tensor) else _without_memory(tensor)


def _without_memory(tensor: torch.Tensor) -> str:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return "is a FakeTensor, which has no data; pass a tensor with data"
    if torch_private.is_functorch_wrapped(tensor):
        return "belongs to vmap, grad or another transform of torch.func, and has no memory of its own; pass its result"
    if torch_private.is_batch_of_gradients(tensor):
        return "stands for a batch of gradients; compute them one by one, without is_grads_batched= or vectorize="
    if _contains_others(tensor) or torch_private.is_functional(tensor):
        name = "functional tensor" if type(tensor) in _PLAIN else type(tensor).__name__
        return f"is {a_or_an(name)}, which has no memory of its own; pass the tensors in it"
    if is_zerotensor(tensor):
        return "is a ZeroTensor, whose zeros are not in memory (pass a clone)"
    return (
        f"{_LOST}: {tensor.untyped_storage().nbytes()} bytes are left in its storage, which was resized "
        "(FSDP does so with gathered parameters); pass it while it has its data"
    )


def _contains_others(tensor: torch.Tensor) -> bool:
    """True if tensors of its class dispatch to other tensors instead of holding values."""
    if type(tensor) in _PLAIN:
        return False
    return hasattr(type(tensor), "__tensor_flatten__") or (torch_private.is_of_python(tensor) and not is_backed(tensor))


def readable(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor that torch's own functions may read: the tensor itself, or a copy of a ZeroTensor.

    Tensors without data pass: torch knows how to deal with them.

    Args:
        tensor: Any tensor.
        what: The name of the tensor, for the error.

    Raises:
        TypeError: Its storage was freed or shortened, which torch does not notice.
    """
    if is_backed(tensor) or not (reason := absence(tensor)):
        return tensor
    if reason.startswith(_LOST):
        raise TypeError(f"{what} {reason}")
    return tensor.clone() if is_zerotensor(tensor) else tensor


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or one over the same memory that may be written in other threads and at other times.

    torch forbids writing to a tensor of inference mode outside of the mode, and each thread has a mode of its own.
    """
    return _as_normal(tensor) if tensor.is_inference() else tensor


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that values have arrived in the memory of these tensors, as if torch had copied them there."""
    written = [tensor for tensor in tensors if tensor.numel() and not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


@torch.inference_mode(False)
def _as_normal(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_unfinished(tensor: torch.Tensor) -> bool:
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    return functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor)


def backed(tensor: torch.Tensor, what: str = "the value") -> torch.Tensor:
    """Return a detached tensor with the values of any tensor in memory; the same memory if possible.

    ZeroTensors, conjugate and negative views are copied; an unfinished functional collective is waited for.

    Args:
        tensor: Any tensor.
        what: The name of the tensor, for the error.

    Raises:
        TypeError: It has no values in memory of its own, torch cannot copy them, or they have a tangent.

    Example:
        >>> backed(torch._efficientzerotensor(2))
        tensor([0., 0.])
    """
    if _is_unfinished(tensor):
        tensor = cast(torch.Tensor, cast(Any, tensor).wait())
    with torch_private.DisableTorchFunctionSubclass():
        if is_zerotensor(tensor) and not tensor.is_meta:
            tensor = tensor.clone()
        if reason := _absence(tensor):
            raise TypeError(f"{what} {reason}")
        if tensor.dtype in UNCOPIED:
            raise TypeError(f"{what} is {tensor.dtype}, which torch cannot copy; pass .view(torch.uint8)")
        plain = tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
        return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
