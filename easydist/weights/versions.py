"""Weights in versions: what receivers have is always one complete version, the same on all of them.

A version travels into memory of its own. Only when every member has said that it has all of it, each copies it to
where it is used. So a member that is lost at any moment leaves the others with the version before.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from easydist.agreement.runner import run
from easydist.typing import Group, Timeout
from easydist.weights.exchange import BUCKET_NBYTES, Sending
from easydist.weights.members import Member, Publish
from easydist.weights.receivers import memory_of
from easydist.weights.source import Filter, Rename, state_of
from easydist.weights.target import Wanted

__all__ = ["WeightPublisher", "WeightReceiver"]


class WeightPublisher(Member):
    """Publishes versions of a model's weights to the receivers of a group.

    Each member of the group is a ``WeightPublisher`` or a ``WeightReceiver``; several publishers are the ranks of one
    sharded model. While ``publish`` runs, every receiver calls ``receive``.

    Args:
        model_or_dict: A module, or a state dict that is changed in place; it may hold DTensors.
        src: The publisher's rank in the group; of a sharded model all ranks.
        group: The members.
        dtype: As in ``broadcast_state_dict``, and so are the following.
        filter: Likewise.
        rename: Likewise.
        verify: Likewise.
        bucket_bytes: Likewise.

    Attributes:
        version: The last version that all members have; 0: none yet.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> publisher = weights.WeightPublisher(torch.nn.Linear(2, 1))
        >>> publisher.publish(), publisher.publish(10), publisher.publish()
        (1, 10, 11)
    """

    def __init__(
        self,
        model_or_dict: Any,
        *,
        src: int | Sequence[int] = 0,
        group: Group = None,
        dtype: torch.dtype | None = None,
        filter: Filter = None,
        rename: Rename = None,
        verify: bool = False,
        bucket_bytes: int = BUCKET_NBYTES,
    ) -> None:
        super().__init__(group, src)
        self._model_or_dict = model_or_dict
        self.wanted = Wanted(filter, rename)
        self.sending = Sending(dtype, bucket_bytes, verify)

    def weights(self) -> Any:
        """What is published."""
        return self._model_or_dict

    def publish(self, version: int | None = None, *, timeout: Timeout | None = None) -> int:
        """Give the weights, as they are now, to all receivers.

        Law: it returns when every receiver has the version and uses it from now on, or raises, and none does.

        Args:
            version: Larger than the one before; None is one more.
            timeout: How long the call may take; None is the group's.

        Returns:
            The version.

        Raises:
            RemoteError: The version is not newer than what a member has, or the weights cannot be sent or taken.
            DisagreementError: A receiver's model has other names, shapes or dtypes.
            PeerLostError: A member was lost; the others keep what they have, and go on with ``regroup``.
            CollectiveTimeout: A member did not come; likewise.

        Cost: that of ``broadcast_state_dict``, and one header exchange.
        """
        return int(run(Publish(self, self.src, version), self.comms, timeout))


class WeightReceiver(Member):
    """Receives versions of weights; what it has is always one complete version.

    Args:
        model_or_dict: What is updated when a version is complete: a module or a dict of tensors. None: ``state`` is a
            dict of new tensors.
        src: The publisher's rank in the group; of a sharded model all ranks.
        group: The members.

    Attributes:
        version: The version that is here; 0: none yet.
        state: The weights of that version: what was passed, or a dict whose tensors keep their values until the second
            version after it arrives; None before the first.

    Raises:
        TypeError: It is neither a module nor a dict.
        ValueError: A tensor of it is on the meta device.

    Cost: memory for a second copy of the weights, where the next version arrives.
    """

    receives = True

    def __init__(self, model_or_dict: Any = None, *, src: int | Sequence[int] = 0, group: Group = None) -> None:
        super().__init__(group, src)
        self.state: Any = model_or_dict
        self._swaps = model_or_dict is None
        self._spare: dict[str, Any] = {} if self._swaps else _room_like(state_of(model_or_dict))

    def room(self) -> dict[str, Any]:
        """Where the next version arrives."""
        return self._spare

    def weights(self) -> Any:
        """The version that is here."""
        return self.state

    def receive(self, *, timeout: Timeout | None = None) -> int:
        """Wait for the next version, and take it.

        Law: after it ``version`` and ``state`` are those of ``publish``; if it raises, they are what they were.

        Args:
            timeout: How long the call may take; None is the group's.

        Returns:
            The version.

        Raises:
            EasydistError: As ``WeightPublisher.publish``.

        Cost: that of ``publish``, and a copy from memory to memory.
        """
        return int(run(Publish(self, self.src), self.comms, timeout))

    def commit(self, version: int) -> None:
        """Use the version that has arrived."""
        if self._swaps:
            self.state, self._spare = self._spare, self.state or {}
        elif isinstance(self.state, nn.Module):
            self.state.load_state_dict(self._spare)
        else:
            _copy(self.state, self._spare)
        super().commit(version)


def _room_like(state: Mapping[str, Any]) -> dict[str, Any]:
    """Memory like that of a state dict; what is tied stays tied."""
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
