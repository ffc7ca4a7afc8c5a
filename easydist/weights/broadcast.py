"""A state dict from the ranks that have it to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.base.eager import eager
from easydist.state import communicators
from easydist.typing import Device, Group, Timeout
from easydist.verbs.ranks import named_rank
from easydist.weights.exchange import BUCKET_NBYTES, BroadcastWeights, Sending
from easydist.weights.source import Filter, Rename
from easydist.weights.target import Wanted

__all__ = ["broadcast_state_dict"]


@eager
@hiding(src=0)
def broadcast_state_dict(
    model_or_dict: Any = None,
    src: int | Sequence[int] = UNSET,
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
    group_src: int | Sequence[int] | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Send all ranks the weights of one rank, or of the ranks over which a model is sharded; or an optimizer's state.

    Law: after ``broadcast_state_dict(model)`` the state of every receiver is that after
    ``model.load_state_dict(state, strict)`` with the ``state`` of rank ``src``. After
    ``broadcast_state_dict(optimizer)`` every rank's optimizer continues as that of rank ``src`` would: it has the same
    settings and the same state, bit for bit and in the same dtypes, whatever state it had before.

    The call writes existing tensors in place, without a copy where dtype, device and strides allow it. It checks
    everything that can fail on all ranks before the first byte moves: missing and unexpected names, shapes, dtypes,
    tensors that cannot be sent or written, and memory. Then either all ranks raise or none does. Nothing is pickled.
    Entries that are not tensors, such as ``_extra_state``, travel if ``save`` accepts their values.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> model = torch.nn.Linear(2, 1)
        >>> list(weights.broadcast_state_dict(model))
        ['weight', 'bias']

    Args:
        model_or_dict: On ``src``, the module, optimizer or state dict to send. Its tensors may be ``DTensor`` (FSDP2,
            tensor parallel) or ``LocalShard``, but not in an optimizer: each rank that holds a part then sends it to
            those that want it, so that no source holds the whole model. On other ranks, the target: a module, which may
            be on the meta device or sharded; an optimizer of the same class, with the same parameters in the same
            groups; a dict of tensors or their parts; None or an empty dict for new tensors.
        src: The source, a rank inside the group. For a sharded model any rank of its mesh, or all ranks of the mesh,
            which is needed if the mesh belongs to another world than ``group``. With a group of torch, it must be the
            same rank of the world. The sources' weights do not change.
        strict: True if a receiver's names must equal those that arrive. Otherwise names that only one side has are
            skipped. Shapes must always be equal. A name that is tied to another one that arrives is not missing.
        dtype: The dtype in which floating-point tensors travel; the source decides. The receiver casts them to its own
            dtype, as ``load_state_dict`` does; tensors that are not floating-point must have the same dtype.
        filter: ``filter(name)`` selects the entries to send or, on a receiver, to accept.
        rename: A function or dict from names to names, for the entries to send or, on a receiver, the arriving ones. It
            applies after ``filter``.
        device: The device of new tensors; None means the type of device that they have on the source.
        offload_to_cpu: Put new tensors on the CPU.
        pin_memory: Put new tensors on the CPU in pinned memory, if there is an accelerator.
        verify: Compare a digest of every tensor afterwards; the source decides. Needs the extra ``weights``.
        bucket_bytes: The most bytes in transit, and copied on the way, per rank; the source decides.
        progress: True to show a bar on the first rank of the group if the call takes longer than a second. Needs tqdm.
        group: The participating ranks.
        group_src: The same as ``src``, for any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        On a receiver the updated state dict, which is the dict that it passed, or the ``state_dict()`` of the module or
        optimizer; if it passed nothing, new tensors by name. On a source its own state dict.

    Raises:
        DisagreementError: A receiver cannot accept the entries; the text lists every name. Or its optimizer has another
            class, or other groups or parameters. Or the ranks name different sources, or a shard of a sharded source is
            missing. Nothing was written.
        RemoteError: A source's entry cannot travel, or a receiver lacks memory or cannot write a tensor. Nothing was
            written.
        TypeError: The same in a world of one.
        ValueError: ``src`` is not a rank of the group, or is ambiguous; or ``bucket_bytes`` is too small.
        WireError: With ``verify``: the received bytes differ from the sent ones. The text names the entries; the
            targets are overwritten.

    Cost: two header exchanges, and a broadcast of the header if it is larger than a frame; then one broadcast for each
    block of 256 KiB to a quarter of ``bucket_bytes``, straight from its memory, and one for as much of all smaller
    tensors. Several are in transit at once. Blocks go only to the ranks that want them, except over NCCL; if these are
    not the same for all blocks, that takes an all-gather of the blocks' places, more messages for small tensors, and a
    barrier. ``verify`` adds a broadcast of 16 bytes per tensor and a header exchange.
    Preparing a state dict costs a rank 15 µs for each tensor, or 3 µs if one of the last few differed only in its
    values.

    Source: ``torch.nn.Module.load_state_dict``; for optimizers ``torch.optim.Optimizer.load_state_dict``, which casts
    the state to the parameters' dtype, as this call does not.
    """
    wanted = Wanted(filter, rename, strict, False, "cpu" if offload_to_cpu else device, pin_memory)
    sending = Sending(dtype, bucket_bytes, verify)
    sources = named_rank(group, "broadcast_state_dict", "src", src, group_src)
    verb = BroadcastWeights("broadcast_state_dict", model_or_dict, sources, wanted, sending, progress)
    return run(verb, communicators(group), timeout, check)
