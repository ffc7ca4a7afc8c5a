"""Weights and objects between Ray actors."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from easydist.agreement.call import Call
from easydist.agreement.runner import run
from easydist.eager import eager
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Device, Timeout
from easydist.verbs.objects import broadcast_object_list
from easydist.weights.actors import create_group, destroy_group, group, init_group
from easydist.weights.exchange import BroadcastWeights, Sending
from easydist.weights.target import Wanted

__all__ = [
    "create_group",
    "destroy_group",
    "group",
    "init_group",
    "ray_broadcast_object",
    "ray_broadcast_tensor_dict",
]

_BACKENDS = ("nccl", "gloo")


@eager
def ray_broadcast_tensor_dict(
    tensor_dict: MutableMapping[str, Any] | None,
    src: int = 0,
    device: Device | None = None,
    group_name: str = "default",
    backend: str = "nccl",
    offload_to_cpu: bool = False,
    pin_memory: bool = False,
    *,
    verify: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Give all actors of a group the tensors of one.

    Law: every actor has the names and values of the ``tensor_dict`` of rank ``src``, bit for bit.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.ray_broadcast_tensor_dict({}, group_name="weights")
        Traceback (most recent call last):
        ValueError: this process is in no group 'weights'; call init_group, or create_group in the driver

    Args:
        tensor_dict: On ``src`` what is sent. Elsewhere a dict whose tensors are written in place, where there are any:
            new names are added, and names that do not come are removed. None or an empty dict: all tensors are new.
        src: The source, a rank of the group.
        device: Where new tensors shall be; None: on the type of device that they have on the source, if this actor
            has one.
        group_name: Of ``init_group`` or ``create_group``, or of ``ray.util.collective``.
        backend: Accepted for the signature's sake. The group uses what it has: the memory of a node, gloo between
            nodes; tensors on GPUs go by way of the CPU.
        offload_to_cpu: New tensors lie on the CPU.
        pin_memory: New tensors on the CPU lie in pinned memory, where there is a GPU.
        verify: Compare a digest of every tensor afterwards; the source says so.
        timeout: How long the call may take; None is the group's.

    Returns:
        On ``src`` the dict itself; elsewhere the dict that was passed, or a new one.

    Raises:
        DisagreementError: A tensor to be written in place has another shape, or the actors name several sources.
        RemoteError: A tensor cannot be sent (sparse, on the meta device, an object), or an actor has no memory or no
            GPU for it.
        PeerLostError: An actor was lost.
        CollectiveTimeout: An actor did not come in time; the text names it.
        ValueError: ``src`` is not a rank of the group, or the backend is unknown; or this process is not in the group.

    Cost: that of ``broadcast_state_dict``; actors of one node share memory.

    Source: ColossalAI's ``ray_broadcast_tensor_dict``.
    """
    comms = communicators(group(group_name))
    where: Device | None = "cpu" if offload_to_cpu else device
    if where is None and not torch.cuda.is_available():
        where = "cpu"
    wanted = Wanted(None, None, False, True, where, pin_memory)
    return run(_RayBroadcast(tensor_dict, src, wanted, Sending(verify=verify), backend, device), comms, timeout)


class _RayBroadcast(BroadcastWeights):
    """Checks what only this signature has, so that all actors hear of it."""

    def __init__(
        self, tensor_dict: Any, src: int, wanted: Wanted, sending: Sending, backend: str, device: Device | None
    ) -> None:
        super().__init__("ray_broadcast_tensor_dict", tensor_dict, src, wanted, sending)
        self._backend, self._device = backend, device

    def prepare(self, comms: Communicators) -> Call:
        if self._backend not in _BACKENDS:
            raise ValueError(f"backend={self._backend!r} is none of {', '.join(_BACKENDS)}")
        if self._device is not None and torch.device(self._device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self._device!r}, but this actor has no GPU; ask Ray for one with num_gpus=")
        return super().prepare(comms)


def ray_broadcast_object(
    obj: Any,
    src: int = 0,
    device: Device | None = None,
    group_name: str = "default",
    backend: str = "nccl",
    *,
    weights_only: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Give all actors of a group the object of one.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.ray_broadcast_object({"step": 1}, group_name="weights")
        Traceback (most recent call last):
        ValueError: this process is in no group 'weights'; call init_group, or create_group in the driver

    Args:
        obj: On ``src`` what is sent; elsewhere not looked at.
        src: The source, a rank of the group.
        device: Accepted for the signature's sake.
        group_name: As in ``ray_broadcast_tensor_dict``.
        backend: Accepted for the signature's sake.
        weights_only: As in ``broadcast_object_list``, which also says what is pickled.
        timeout: How long the call may take; None is the group's.

    Returns:
        On ``src`` the object itself, elsewhere an equal one.

    Raises:
        ValueError: ``src`` is not a rank of the group, or this process is not in the group.
        EasydistError: As ``broadcast_object_list``.

    Cost: that of ``broadcast_object_list``.

    Source: ColossalAI's ``ray_broadcast_object``.
    """
    comm = group(group_name)
    objects = [obj if comm.get_rank() == src else None]
    broadcast_object_list(objects, src, group=comm, weights_only=weights_only, timeout=timeout)
    return objects[0]
