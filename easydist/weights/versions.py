"""Versioned weights: receivers always have one complete version, the same on all of them.

A version travels into memory of its own. Each member copies it to its final place only after every member has
confirmed that it has all of it. So a member lost at any moment leaves the others with the previous version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.typing import Group, Timeout
from easydist.weights.exchange import BUCKET_NBYTES, Sending
from easydist.weights.holders import Holder, Publish
from easydist.weights.source import Filter, Rename, memory_of, state_of
from easydist.weights.target import Wanted

__all__ = ["WeightPublisher", "WeightReceiver"]


class WeightPublisher(Holder):
    """Publishes versions of a model's weights to the receivers of a group.

    Each member of the group is a ``WeightPublisher`` or a ``WeightReceiver``. Several publishers are the ranks of one
    sharded model. While ``publish`` runs, every receiver calls ``receive``.

    Args:
        model_or_dict: A module, or a state dict that is changed in place; it may hold DTensors.
        src: The publisher's rank in the group; for a sharded model all ranks. With a group of torch, it must be the
            same rank of the world.
        group: The members.
        group_src: The same as ``src``, for any group.
        dtype: As in ``broadcast_state_dict``.
        filter: As in ``broadcast_state_dict``.
        rename: As in ``broadcast_state_dict``.
        verify: As in ``broadcast_state_dict``.
        bucket_bytes: As in ``broadcast_state_dict``.

    Attributes:
        version: The last version that all members have; 0 if there is none yet.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> publisher = weights.WeightPublisher(torch.nn.Linear(2, 1))
        >>> publisher.publish(), publisher.publish(10), publisher.publish()
        (1, 10, 11)
    """

    @hiding(src=0)
    def __init__(
        self,
        model_or_dict: Any,
        *,
        src: int | Sequence[int] = UNSET,
        group: Group = None,
        group_src: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        filter: Filter = None,
        rename: Rename = None,
        verify: bool = False,
        bucket_bytes: int = BUCKET_NBYTES,
    ) -> None:
        super().__init__(group, src, group_src)
        self._model_or_dict = model_or_dict
        self.wanted = Wanted(filter, rename)
        self.sending = Sending(dtype, bucket_bytes, verify)

    def weights(self) -> Any:
        """Return the weights to publish."""
        return self._model_or_dict

    def publish(self, version: int | None = None, *, timeout: Timeout | None = None) -> int:
        """Send the current weights to all receivers.

        Law: either it returns, and every receiver has the version and uses it from now on; or it raises, and none does.

        Args:
            version: A number larger than the previous one; None means the previous one plus one.
            timeout: The time limit of the call; None is the group's.

        Returns:
            The version.

        Raises:
            RemoteError: The version is not newer than a member's, or the weights cannot be sent or received.
            DisagreementError: A receiver's model has other names, shapes or dtypes.
            PeerLostError: A member was lost. The others keep their version, and continue with ``regroup``.
            CollectiveTimeout: A member did not come. The others keep their version, and continue with ``regroup``.

        Cost: that of ``broadcast_state_dict``, and one header exchange.
        """
        return int(run(Publish(self, self.src, version), self.comms, timeout))


class WeightReceiver(Holder):
    """Receives versions of weights, and always has one complete version.

    Args:
        model_or_dict: The module or dict of tensors to update when a version is complete. None: ``state`` is a dict
            of new tensors.
        src: The publisher's rank in the group; for a sharded model all ranks. With a group of torch, it must be the
            same rank of the world.
        group: The members.
        group_src: The same as ``src``, for any group.

    Attributes:
        version: The version that is here; 0 if there is none yet.
        state: The weights of that version: the argument, or a dict whose tensors keep their values until the second
            version after it arrives; None before the first.
        arrived: The version that ``arrive`` has received and ``commit`` will take into use; None if there is none.

    Raises:
        TypeError: It is neither a module nor a dict.
        ValueError: A tensor of it is on the meta device.

    Cost: memory for a second copy of the weights, in which the next version arrives.
    """

    receives = True
    arrived: int | None

    @hiding(src=0)
    def __init__(
        self,
        model_or_dict: Any = None,
        *,
        src: int | Sequence[int] = UNSET,
        group: Group = None,
        group_src: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(group, src, group_src)
        self.state: Any = model_or_dict
        self._swaps, self.arrived = model_or_dict is None, None
        self._spare: dict[str, Any] = {} if self._swaps else _room_like(state_of(model_or_dict))

    def room(self) -> dict[str, Any]:
        """Return the memory for the next version."""
        return self._spare

    @property
    def newest(self) -> int:
        """The newest version that is here, whether or not it is in use."""
        return self.version if self.arrived is None else self.arrived

    def weights(self) -> Any:
        """Return the weights of the newest version that is here."""
        return self.state if self.arrived is None else self._spare

    def receive(self, *, timeout: Timeout | None = None) -> int:
        """Wait for the next version, and start to use it.

        Law: afterwards ``version`` and ``state`` are those of ``publish``; if it raises, they have not changed.

        Args:
            timeout: The time limit of the call; None is the group's.

        Returns:
            The version.

        Raises:
            EasydistError: As for ``WeightPublisher.publish``.

        Cost: that of ``publish``, and a copy from memory to memory.
        """
        if self.arrived is not None:
            self.commit()
        self.arrive(timeout=timeout)
        return self.commit()

    def arrive(self, *, timeout: Timeout | None = None) -> int:
        """Wait for the next version, without using it: ``state`` does not change until ``commit``.

        Let a thread call it while others use the weights. ``publish`` returns as for ``receive``: every member has the
        version then, and nothing can fail any more.

        Args:
            timeout: The time limit of the call; None is the group's.

        Returns:
            The version.

        Raises:
            EasydistError: As for ``WeightPublisher.publish``. A RemoteError also if a version has arrived before, and
                waits for ``commit``.

        Cost: that of ``publish``.
        """
        verb = Publish(self, self.src, use=self._hold)
        if self.arrived is not None:
            verb.refusal = RuntimeError(f"version {self.arrived} has arrived, and waits for commit()")
        return int(run(verb, self.comms, timeout))

    async def areceive(self, *, timeout: Timeout | None = None) -> int:
        """Do as ``receive`` in an ``asyncio`` program, which goes on meanwhile; other coroutines see no mixture.

        The version arrives in a thread, and is taken into use in the event loop. A task that is cancelled leaves the
        thread, so the version may still arrive: ``arrived`` tells.
        """
        await asyncio.to_thread(self.arrive, timeout=timeout)
        return self.commit()

    def commit(self) -> int:
        """Start to use the version that has arrived; no other rank takes part.

        With a model or dict this copies from memory to memory, so call it while nobody uses the weights: under your
        lock, or between two steps. Without one, ``state`` becomes another dict.

        Returns:
            The version.

        Raises:
            RuntimeError: No version has arrived since the last call.
        """
        if self.arrived is None:
            raise RuntimeError("no version has arrived that could be used; call arrive() first")
        self.use(self.arrived)
        return self.version

    def _hold(self, version: int) -> None:
        self.arrived = version

    def replace(self) -> Callable[[int], None]:
        """Forget a version that waits for ``commit``, and return the function that takes another one in its place."""
        is_held, self.arrived = self.arrived is not None, None
        return self._hold if is_held else self.use

    def use(self, version: int) -> None:
        """Start to use the version in the spare memory."""
        if self._swaps:
            self.state, self._spare = self._spare, self.state or {}
        elif isinstance(self.state, nn.Module):
            self.state.load_state_dict(self._spare)
        else:
            _copy(self.state, self._spare)
        self.arrived = None
        super().use(version)


def _room_like(state: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate memory like that of a state dict. Tied entries stay tied."""
    made: dict[Any, torch.Tensor] = {}
    room: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ValueError(
                f"WeightReceiver: [{name!r}] is on the meta device; give it memory: model.to_empty(device=…)"
            )
        if isinstance(value, torch.Tensor) and memory_of(value) not in made:
            made[memory_of(value)] = torch.empty_like(value.detach(), memory_format=torch.contiguous_format)
        room[name] = made[memory_of(value)] if isinstance(value, torch.Tensor) else value
    return room


def _copy(into: MutableMapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            into[name].detach().copy_(value)
        else:
            into[name] = value
