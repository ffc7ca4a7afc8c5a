"""Versioned weights: receivers always have one complete version, the same on all of them.

A version travels into memory of its own. Each member copies it to its final place only after every member has
confirmed that it has all of it. So a member lost at any moment leaves the others with the previous version.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Generator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from easydist import memory
from easydist.agreement.calling import in_thread
from easydist.agreement.runner import run, stream
from easydist.base.arguments import UNSET, hiding
from easydist.data.leaves import Leaves
from easydist.typing import Group, Timeout
from easydist.weights.holders import Publish
from easydist.weights.manifest import Manifest
from easydist.weights.members import Load, Member
from easydist.weights.shards import check_dense, empty_like, is_tensor, local, memory_of
from easydist.weights.source import state_of

__all__ = ["WeightReceiver"]


class WeightReceiver(Member):
    """Receives versions of weights, and always has one complete version.

    Args:
        model_or_dict: The module or dict of tensors to update when a version is complete, which may be ``DTensor`` or
            ``LocalShard``; an empty dict gets new tensors. None: ``state`` is a dict of new tensors.
        src: The publisher's rank in the group; for a sharded model all ranks. With a group of torch, it must be the
            same rank of the world.
        group: The members.
        group_src: The same as ``src``, for any group.

    Attributes:
        version: The version that is here; 0 if there is none yet, or none after a loop over ``stream`` that failed.
        state: The weights of that version: the argument, or a dict whose tensors keep their values until the second
            version after it arrives; None before the first, and after ``stream``.
        arrived: The version that ``arrive`` has received and ``commit`` will take into use; None if there is none.

    Raises:
        TypeError: It is neither a module nor a dict, or a tensor of it is not dense.
        ValueError: A tensor of it is on the meta device, or shares memory with another one or with itself.

    Cost: memory for a second copy of the weights, in which the next version arrives.
    """

    receives = True
    arrived: int | None
    _stale: Set[str] | None = None
    """The entries of the spare memory that differ from the version in use; None means all."""

    _layout: Any = None
    """The layout of the version in use."""

    _spare_layout: Any = None
    """The layout of the version in the spare memory."""

    _arriving: Set[str] | None = None
    """The entries of the version that is arriving; None means all."""

    _open: weakref.ref[Generator[tuple[str, Any], None, None]] | None = None
    """The last iterator that ``stream`` has returned."""

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
        self._turns = asyncio.Lock()

    def room(self, manifest: Manifest) -> dict[str, Any]:
        """Return the memory for the next version: new memory if that of a receiver without a model does not fit."""
        return {} if self._swaps and self._spare_layout != manifest.layout else self._spare

    def has(self, version: int, streams: bool, manifest: Manifest) -> bool:
        """True if the entries of the version in use may be kept for the next one, whose entries are these."""
        is_alike = streams or not self._swaps or self._layout == manifest.layout
        return is_alike and super().has(version, streams, manifest)

    @property
    def newest(self) -> int:
        """The newest version that is here, whether or not it is in use."""
        return self.version if self.arrived is None else self.arrived

    def weights(self) -> Any:
        """Return the weights of the newest version that is here."""
        return self.state if self.arrived is None else self._spare

    def receive(self, *, timeout: Timeout | None = None) -> int:
        """Wait for the next version, and start to use it.

        Law: afterwards ``version`` and ``state`` are those of ``publish``; if it raises, they have not changed. A
        version that waits for ``commit`` is committed first.

        Args:
            timeout: The time limit of the call; None is the group's.

        Returns:
            The version.

        Raises:
            EasydistError: As for ``WeightPublisher.publish``.

        Cost: that of ``publish``, and a copy from memory to memory.
        """
        self._commit_held()
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
        return int(run(self._next(Publish(self, self.src, use=self.hold)), self.comms, timeout))

    def stream(self, *, timeout: Timeout | None = None) -> Generator[tuple[str, Any], None, None]:
        """Wait for the next version, and iterate over its names and tensors as they arrive.

        Law: ``dict(receiver.stream())`` has the entries that ``publish`` sends. The version counts, and ``publish``
        returns, once all members have all of it: at the end of the loop ``version`` is its number.

        This is for an engine that loads the weights itself and has no room for a second copy, and for a receiver
        without a model. Other members may call ``receive``. The iterator yields an entry once it is complete, with the
        dtype that travels, and drops it when the loop asks for the next one. Tied entries come under each of their
        names.

        If the loop ends early, by ``break`` or an exception, all other members raise a ``RemoteError``, as soon as the
        iterator is dropped: ``contextlib.closing`` does that at once. The engine may then have parts of two versions,
        so ``version`` is 0 until the next one, of which all entries travel.

        Args:
            timeout: The time limit of the call, with all that the loop does; None is the group's.

        Returns:
            An iterator; the call begins when the iterator is first advanced.

        Raises:
            EasydistError: As for ``WeightPublisher.publish``, and as for ``arrive``. ``version`` is 0 if entries may
                have been loaded.

        Cost: that of ``publish``; memory for the bucket, and for the largest tensor.
        """
        entries = stream(self._next(Publish(self, self.src, streams=True)), self.comms, timeout)
        self._open = weakref.ref(entries)
        return entries

    def end_stream(self) -> None:
        """End a loop that was left while something, such as a traceback, keeps its iterator."""
        if self._open is not None and (left := self._open()) is not None:
            left.close()

    def _next(self, verb: Publish) -> Publish:
        """Return the verb for the next version, with a refusal if one waits for ``commit``."""
        self.end_stream()
        if self.arrived is not None:
            verb.refusal = RuntimeError(f"version {self.arrived} has arrived, and waits for commit()")
        return verb

    async def areceive(self, *, timeout: Timeout | None = None) -> int:
        """Do as ``receive`` without blocking the event loop; other coroutines never see a mixture of two versions.

        The version arrives in a thread, and is committed in the event loop. If the task is cancelled, the thread runs
        on, so the version may still arrive: ``arrived`` is then its number, and the next call commits it first. Calls
        that overlap take turns, each for a version of its own.
        """
        async with self._turns:
            self._commit_held()
            await in_thread(functools.partial(self.arrive, timeout=timeout))
            return self.commit()

    async def aregroup(
        self,
        group: Group = None,
        src: int | Sequence[int] | None = None,
        *,
        group_src: int | Sequence[int] | None = None,
        load: Load | None = None,
    ) -> int:
        """Do as ``regroup`` without blocking the event loop, and commit in it, as ``areceive`` does."""
        call = functools.partial(self.regroup, group, src, group_src=group_src, load=load, commit=False)
        async with self._turns:
            version = await in_thread(call)
            self._commit_held()
            return version

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

    def _commit_held(self) -> None:
        if self.arrived is not None:
            self.commit()

    def hold(self, version: int) -> None:
        """Keep the version that has arrived for ``commit``."""
        self.arrived = version

    def forget(self) -> bool:
        """Forget a version that waits for ``commit``; True if there was one."""
        is_held, self.arrived = self.arrived is not None, None
        return is_held

    def check_streams(self) -> None:
        """Raise if a model or dict receives the versions.

        Raises:
            TypeError: It does.
        """
        if not self._swaps:
            raise TypeError("stream() and load= are for a receiver without a model: they hand over what it would load")

    def begin(self, names: Set[str] | None, streams: bool) -> None:
        """Take note that a version begins to arrive: all entries, or these."""
        if streams:  # what the engine has is no version any more
            self.version, self.state, self._spare, names = 0, None, {}, None
        self.streams, self._arriving = streams, names
        self.arrived = None  # its memory is about to change
        self._stale = None if names is None or self._stale is None else self._stale | names

    def fill(self, room: dict[str, Any], manifest: Manifest) -> None:
        """Copy the entries that have not changed to the memory in which a version has arrived, if others are there."""
        if self.streams:
            return
        if room is not self._spare:
            self._spare, self._stale = room, None
        self._spare_layout = manifest.layout
        if self._arriving is not None:
            written = {memory_of(self._spare[name]) for name in self._arriving}
            stale = (self._spare.keys() if self._stale is None else self._stale) - self._arriving
            state = state_of(self.state)
            kept = {name: state[name] for name in stale if memory_of(self._spare[name]) not in written}
            _copy(self._spare, kept)
        self._stale = self._arriving

    def use(self, version: int) -> None:
        """Start to use the version in the spare memory."""
        arrived = self._spare if self._stale is None else {name: self._spare[name] for name in self._stale}
        if self._swaps:
            self.state, self._spare = (None, {}) if self.streams else (self._spare, self.state or {})
            self._layout, self._spare_layout = self._spare_layout, self._layout
        else:
            with _mode_of(self.state):
                self._store(arrived)
            self._stale = set()
        self.arrived = None
        super().use(version)

    def _store(self, arrived: Mapping[str, Any]) -> None:
        """Copy entries that have arrived into the module or dict."""
        if isinstance(self.state, nn.Module):
            self.state.load_state_dict(arrived, strict=self._stale is None)
            return
        if not self.state:
            self.state.update(_room_like(arrived))
        _copy(self.state, arrived)


def _mode_of(state: Any) -> AbstractContextManager[None]:
    """Return the mode in which these weights can be written: those made in inference mode only there."""
    tensors = map(local, filter(is_tensor, state_of(state).values()))
    return torch.inference_mode() if any(map(torch.Tensor.is_inference, tensors)) else nullcontext()


@memory.kept
def _room_like(state: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate memory like that of a state dict. Tied entries stay tied."""
    made: dict[Any, Any] = {}
    room: dict[str, Any] = {}
    written: dict[str, torch.Tensor] = {}
    check_dense(state)
    for name, value in state.items():
        if is_tensor(value) and value.is_meta:
            raise ValueError(
                f"WeightReceiver: [{name!r}] is on the meta device; give it memory: model.to_empty(device=…)"
            )
        if is_tensor(value) and memory_of(value) not in made:
            made[memory_of(value)], written[name] = empty_like(value), local(value).detach()
        room[name] = made[memory_of(value)] if is_tensor(value) else value
    with torch.inference_mode():  # as commit may be called
        Leaves(written).check_writable()
    return room


def _copy(into: MutableMapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if is_tensor(value):
            local(into[name]).detach().copy_(local(value))
        else:
            into[name] = value
