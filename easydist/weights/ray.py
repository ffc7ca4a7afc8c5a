"""Broadcasts of weights and objects between Ray actors."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from easydist.agreement.call import Call
from easydist.agreement.runner import run
from easydist.base.eager import eager
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
    """Send all actors of a group the tensors of one.

    Law: every actor has the names and values of the ``tensor_dict`` of rank ``src``, bit for bit.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.ray_broadcast_tensor_dict({}, group_name="weights")
        Traceback (most recent call last):
        ValueError: this process is in no group 'weights'; call init_group, or create_group in the driver

    Args:
        tensor_dict: On ``src``, the tensors to send. On other actors, a dict whose tensors are written in place: new
            names are added, and names that do not arrive are removed. None or an empty dict: all tensors are new.
        src: The source, a rank of the group.
        device: The device of new tensors; None means the type of device that they have on the source, if this actor
            has one.
        group_name: The name given to ``init_group``, ``create_group`` or ``ray.util.collective``.
        backend: Accepted for compatibility. The group uses its own transport: shared memory inside a node, gloo between
            nodes. Tensors on GPUs travel through the CPU, or on the GPU if all actors share it.
        offload_to_cpu: Put new tensors on the CPU.
        pin_memory: Put new tensors on the CPU in pinned memory, if there is a GPU.
        verify: Compare a digest of every tensor afterwards; the source decides.
        timeout: The time limit of the call; None is the group's.

    Returns:
        On ``src`` the dict itself; on other actors the dict that was passed, or a new one.

    Raises:
        DisagreementError: A tensor to be written in place has another shape, or the actors name different sources.
        RemoteError: A tensor cannot be sent (sparse, on the meta device, an object), or an actor lacks memory or a GPU
            for it.
        PeerLostError: An actor was lost.
        CollectiveTimeout: An actor did not come in time; the text names it.
        ValueError: ``src`` is not a rank of the group, the backend is unknown, or this process is not in the group.

    Cost: that of ``broadcast_state_dict``. Actors of one node share memory.

    Source: ColossalAI's ``ray_broadcast_tensor_dict``.
    """
    comms = communicators(group(group_name))
    where: Device | None = "cpu" if offload_to_cpu else device
    if where is None and not torch.cuda.is_available():
        where = "cpu"
    wanted = Wanted(None, None, False, True, where, pin_memory)
    return run(_RayBroadcast(tensor_dict, src, wanted, Sending(verify=verify), backend, device), comms, timeout)


class _RayBroadcast(BroadcastWeights):
    """A broadcast that also checks the arguments of this signature, so that all actors raise."""

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
    """Send all actors of a group the object of one.

    Example:
        >>> import easydist.ray
        >>> easydist.ray.ray_broadcast_object({"step": 1}, group_name="weights")
        Traceback (most recent call last):
        ValueError: this process is in no group 'weights'; call init_group, or create_group in the driver

    Args:
        obj: On ``src``, the object to send. Other actors ignore it.
        src: The source, a rank of the group.
        device: Accepted for compatibility.
        group_name: As in ``ray_broadcast_tensor_dict``.
        backend: Accepted for compatibility.
        weights_only: As in ``broadcast_object_list``, which describes when objects are pickled.
        timeout: The time limit of the call; None is the group's.

    Returns:
        On ``src`` the object itself, on other actors an equal one.

    Raises:
        ValueError: ``src`` is not a rank of the group, or this process is not in the group.
        EasydistError: As for ``broadcast_object_list``.

    Cost: that of ``broadcast_object_list``.

    Source: ColossalAI's ``ray_broadcast_object``.
    """
    comm = group(group_name)
    objects = [obj if comm.get_rank() == src else None]
    broadcast_object_list(objects, group_src=src, group=comm, weights_only=weights_only, timeout=timeout)
    return objects[0]
