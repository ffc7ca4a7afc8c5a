"""A state dict from the ranks that have it to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from easydist.agreement.runner import run
from easydist.eager import eager
from easydist.state import communicators
from easydist.typing import Device, Group, Timeout
from easydist.weights.exchange import BUCKET_NBYTES, BroadcastWeights, Sending
from easydist.weights.source import Filter, Rename
from easydist.weights.target import Wanted

__all__ = ["broadcast_state_dict"]


@eager
def broadcast_state_dict(
    model_or_dict: Any = None,
    src: int | Sequence[int] = 0,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    filter: Filter = None,
    rename: Rename = None,
    device: Device | None = None,
    offload_to_cpu: bool = False,
    pin_memory: bool = False,
    verify: bool = False,
    bucket_bytes: int = BUCKET_NBYTES,
    progress: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Give all ranks the weights of one, or of the ranks over which a model is sharded.

    Law: after ``broadcast_state_dict(model)`` the state of every receiver is what
    ``model.load_state_dict(state, strict)`` makes of the ``state`` of rank ``src``.

    Existing tensors are written in place, without a copy where dtype, device and strides allow it. Whatever can go
    wrong is checked on all ranks before the first byte moves: missing and unexpected names, shapes, dtypes, tensors
    that cannot be sent or written, memory. Then either all ranks raise or none does. Nothing is pickled. Entries that
    are no tensors, such as ``_extra_state``, travel if they hold what ``save`` takes.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> model = torch.nn.Linear(2, 1)
        >>> list(weights.broadcast_state_dict(model))
        ['weight', 'bias']

    Args:
        model_or_dict: On ``src`` what is sent: a module or a state dict. Its tensors may be ``DTensor`` (FSDP2, tensor
            parallel): each rank of their mesh then sends its shards to all, so that the model is whole nowhere but at
            the receivers. Elsewhere what is written: a module, also one on the meta device or sharded; a dict of
            tensors; None or an empty dict for new tensors.
        src: The source, a rank inside the group. Of a sharded model any rank of its mesh; or all ranks of the mesh,
            which is needed where the mesh is of another world than ``group``. They keep their weights as they are.
        strict: Whether a receiver's names have to be those that come. If not, names that only one side has are left
            out. Shapes have to be equal in any case. A name that is tied to another one that comes is not missing.
        dtype: Floating-point tensors travel in this dtype; the source says it. At the receiver they are cast to what
            is there, as ``load_state_dict`` does; tensors that are no floats have to have the same dtype.
        filter: ``filter(name)`` says which entries travel, or on a receiver which ones it takes.
        rename: A function or dict from names to names: of what travels, or on a receiver of what comes. After
            ``filter``.
        device: Where new tensors shall be; None: on the type of device that they have on the source.
        offload_to_cpu: New tensors lie on the CPU.
        pin_memory: New tensors on the CPU lie in pinned memory, where there is an accelerator.
        verify: Compare a digest of every tensor afterwards; the source says so. Needs the extra ``weights``.
        bucket_bytes: How many bytes may be under way, and may be copied on the way, per rank; the source says it.
        progress: Whether the first rank of the group shows a bar, if it takes longer than a second. Needs tqdm.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        On a receiver the state dict as it is now: the dict that it passed, or the module's ``state_dict()``; new
        tensors by name where there was nothing. On a source its own state dict.

    Raises:
        DisagreementError: A receiver cannot take what comes; the text has every name. Or the ranks name several
            sources, or a shard of a sharded source is missing. Nothing was written.
        RemoteError: A source's entry cannot travel, or a receiver has no memory or cannot write a tensor; nothing was
            written.
        TypeError: The same in a world of one.
        ValueError: ``src`` is not a rank of the group; a bucket has no room.
        WireError: With ``verify``: what has arrived is not what was sent. The text names the entries; the targets are
            overwritten.

    Cost: two header exchanges, and a broadcast of the header where it has more than 32 KiB; then one broadcast for each
    block of 256 KiB to a quarter of ``bucket_bytes``, straight from its memory, and one for as much of all smaller
    tensors; several are under way at a time. ``verify`` adds a broadcast of 16 bytes per tensor and a header exchange.
    A state dict that is like one of the last few in all but its values costs a rank 3 µs for each tensor, else 15.

    Source: ``torch.nn.Module.load_state_dict``.
    """
    wanted = Wanted(filter, rename, strict, False, "cpu" if offload_to_cpu else device, pin_memory)
    sending = Sending(dtype, bucket_bytes, verify)
    verb = BroadcastWeights("broadcast_state_dict", model_or_dict, src, wanted, sending, progress)
    return run(verb, communicators(group), timeout, check)
