"""Weights in versions: what receivers have is always one complete version, the same on all of them.

A version travels into memory of its own. Only when every member has said that it has all of it, each copies it to
where it is used. So a member that is lost at any moment leaves the others with the version before.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb, run
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.weights.exchange import BUCKET_NBYTES, BroadcastWeights, Sending, nbytes_of, told
from easydist.weights.receivers import memory_of
from easydist.weights.source import Filter, Rename, state_of
from easydist.weights.target import Announced, Wanted

__all__ = ["WeightPublisher", "WeightReceiver"]

_OPERATION = "publish"


class _Member:
    """One of those that have versions of the same weights.

    Attributes:
        version: The version that is complete here; 0: none yet.
        pending: A version that is complete here, while not all members are known to have it.
    """

    role = ""
    wanted = Wanted()
    sending = Sending()

    def __init__(self, group: Group, src: int | Sequence[int]) -> None:
        self._comms, self._src = communicators(group), src
        self.version = 0
        self.pending: int | None = None

    def weights(self) -> Any:
        """What this member sends of the version that it has."""
        raise NotImplementedError

    def room(self) -> Any:
        """Where the next version arrives."""
        return None

    def commit(self, version: int) -> None:
        """Use the version that has arrived."""
        self.version, self.pending = version, None

    def regroup(self, group: Group = None, src: int | Sequence[int] | None = None) -> int:
        """Go on in another group, after a member was lost or to let members in; all members call it.

        Afterwards all have the newest version that any of them had: who lacks it, as new members do, gets it from a
        receiver that has it, or from the publisher, as its weights are now, where no receiver does.

        Args:
            group: The new group.
            src: The publisher's rank in it, or the ranks; None is as before.

        Returns:
            The version.

        Raises:
            EasydistError: As ``publish``; what this member has stays as it is.

        Cost: a header exchange and an all-gather of a few bytes; if members lack the version, that of ``publish``.
        """
        self._comms = communicators(group)
        self._src = self._src if src is None else src
        members = run(_Meeting(self), self._comms)
        newest: int = max(one["version"] for one in members.values())
        if self.pending == newest > self.version:
            self.commit(newest)
        self.pending = None
        has = {r for r, one in members.items() if newest in (one["version"], one["pending"])}
        receivers = {rank for rank, one in members.items() if one["role"] == WeightReceiver.role}
        if newest and receivers - has:
            sources = sorted(receivers & has)[:1]
            run(_Publish(self, sources or self._src, newest, is_again=True), self._comms)
        self.version = newest
        return newest


class _Meeting(Verb[dict[int, dict[str, Any]]]):
    """The members tell one another what they have."""

    operation = "regroup"

    def __init__(self, member: _Member) -> None:
        self._mine = {"role": member.role, "version": member.version, "pending": member.pending}

    def prepare(self, comms: Communicators) -> Call:
        return Call(nbytes=nbytes_of(self._mine))

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[int, dict[str, Any]]:
        return told(comms, agreed.nbytes, self._mine)

    def result(self, comms: Communicators, agreed: Agreement, arrived: dict[int, dict[str, Any]]) -> Any:
        return arrived


class _Publish(BroadcastWeights):
    """One version to all members that have an earlier one."""

    def __init__(
        self, member: _Member, src: int | Sequence[int], version: int | None = None, is_again: bool = False
    ) -> None:
        super().__init__(_OPERATION, member.room(), src, member.wanted, member.sending)
        self._member, self._version = member, version
        self._is_known = is_again and member.version == version

    def state(self) -> Mapping[str, Any]:
        return state_of(self._member.weights())

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        return rank not in sources and isinstance(self._member, WeightReceiver) and not self._is_known

    def notes(self) -> Mapping[str, Any]:
        version = self._member.version + 1 if self._version is None else self._version
        if version <= self._member.version and not self._is_known:
            raise ValueError(f"version {version} is not newer than {self._member.version}, which was published before")
        self._version = version
        return {"version": version}

    def check(self, announced: Announced) -> None:
        version = announced.about["version"]
        if version <= self._member.version:
            raise ValueError(f"version {version} is not newer than {self._member.version}, which this receiver has")

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        """Move the weights, and hear that all members have all of them."""
        self._member.pending = None
        super().exchange(comms, agreed)
        if comms.size > 1:
            self._version = self.announced.about["version"]
        if self._target is not None:
            self._target.finish()
        self._member.pending = self._version
        agree(comms, f"{_OPERATION} (complete)", lambda: Call({"version": self._version}))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> int:
        assert self._version is not None
        if not self._is_known:
            self._member.commit(self._version)
        self._member.pending = None
        return self._version


class WeightPublisher(_Member):
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

    role = "publisher"

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
        return int(run(_Publish(self, self._src, version), self._comms, timeout))


class WeightReceiver(_Member):
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

    role = "receiver"

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
        return int(run(_Publish(self, self._src), self._comms, timeout))

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
