"""The receiver's side: comparing the arriving entries with the existing ones, then writing them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from easydist import memory
from easydist.base.recent import Kept, recent
from easydist.base.torch_private import foreach_copy
from easydist.data.aliasing import overlap
from easydist.data.leaves import Leaves
from easydist.data.packing import dtype_name
from easydist.format import outline
from easydist.typing import Device
from easydist.verbs.sharded import is_sharded
from easydist.weights.announced import Announced
from easydist.weights.likeness import likeness
from easydist.weights.places import Place, new, place_of
from easydist.weights.receivers import entries_of
from easydist.weights.schedule import Message
from easydist.weights.source import Filter, Rename, local, memory_of, named

Row = tuple[str, str, str]
"""An entry that does not fit: its name, the arriving description, the local one."""


class Wanted(NamedTuple):
    """A receiver's settings.

    Attributes:
        keep: The filter of the entries to accept.
        rename: The mapping to its own names.
        strict: True if its own entries must be exactly these.
        grow: True if its dict becomes the arriving dict: entries are added and removed.
        device: The device of new tensors; None means the type of device on the source.
        pin: True to put new tensors on the CPU in pinned memory.
    """

    keep: Filter = None
    rename: Rename = None
    strict: bool = True
    grow: bool = False
    device: Device | None = None
    pin: bool = False


class _Fit(NamedTuple):
    """The match between arriving entries and the receiver's, valid for all receivers that are like it.

    Attributes:
        written: The entry, the name of the tensor it is written to, and True if its bytes are written unchanged.
        made: The entries and dtypes of new tensors, with the names that each gets.
    """

    written: list[tuple[int, str, bool]]
    made: dict[tuple[int, torch.dtype], list[str]]


_fits: Callable[[Hashable], Kept[_Fit]] = recent(4)


class Target:
    """The receiver's side of one call.

    Args:
        into: A module or dict whose tensors are written; None or an empty dict: all are new.
        announced: The arriving entries.
        wanted: The receiver's settings.

    Raises:
        TypeError: ``into`` is neither.
        ValueError: Two entries get one name.

    Cost: 10 µs for each entry; 3 µs if a receiver like it has received entries like these before.
    """

    def __init__(self, into: Any, announced: Announced, wanted: Wanted) -> None:
        self._announced, self._wanted, self._into = announced, wanted, entries_of(into)
        self._mine = self._into.values
        self._takes_all = wanted.grow or not (self._mine or isinstance(into, nn.Module))
        self._is_strict = wanted.strict and not self._takes_all
        names = named(announced.names, wanted.keep, wanted.rename)
        self._coming = {m: n for n, m in names.items() if self._takes_all or wanted.strict or m in self._mine}
        self._places: list[list[Place]] = [[] for _ in announced.entries]
        self._new: dict[str, torch.Tensor] = {}
        self._behind: set[torch.device] = set()
        self._kept = self._known()
        self._fit = None if self._kept is None else self._kept.value

    def _known(self) -> Kept[_Fit] | None:
        """Return the kept fit; None if it must be computed again."""
        like = likeness(list(self._mine.values()))
        changes = (*self._coming, *self._coming.values()) if self._wanted.keep or self._wanted.rename else None
        rules = self._is_strict, self._takes_all, self._wanted.strict
        if like is None or not self._announced.is_kept:
            return None
        return _fits((self._announced, like, tuple(self._mine), self._into.own, rules, changes))

    def misfit(self) -> list[Row]:
        """Return the differences between arriving entries and the receiver's, sorted by name; empty if all fit."""
        if self._fit is not None:
            return []
        if rows := self._into.misfit(self._announced.about.get("optimizer")):
            return rows
        rows = [row for name in self._coming if (row := self._compared(name)) is not None]
        if self._is_strict:
            absent = [(name, value) for name, value in self._mine.items() if name not in self._coming]
            filled = {memory_of(self._mine[name]) for name in self._coming if absent and name in self._mine}
            rows += [(name, "missing", _described(one)) for name, one in absent if memory_of(one) not in filled]
        return sorted(rows)

    def _entry(self, name: str) -> int | None:
        """Return the entry that arrives under a name; None if it is not a tensor."""
        key = self._announced.names[self._coming[name]]
        return None if key is None else self._announced.index[key]

    def _compared(self, name: str) -> Row | None:
        i = self._entry(name)
        entry = None if i is None else self._announced.entries[i]
        theirs = "no tensor" if entry is None else _text(entry.dtype, entry.shape)
        if name not in self._mine:
            return (name, theirs, "missing") if self._is_strict else None
        value = self._mine[name]
        if entry is None or not isinstance(value, torch.Tensor):
            fits = entry is None and not isinstance(value, torch.Tensor)
        else:
            are_floats = entry.dtype.is_floating_point and value.dtype.is_floating_point
            fits = tuple(value.shape) == entry.shape and (are_floats or value.dtype == entry.dtype)
        return None if fits else (name, theirs, _described(value))

    def allocate(self) -> None:
        """Find or create the memory for all entries, before the first byte arrives.

        Raises:
            RuntimeError: There is not enough memory, or no such device.
            ValueError: A tensor of ``into`` cannot be written.
        """
        if self._fit is None:
            self._fit = self._found()
        else:
            self._check_apart(self._fit)
        boxes = self._announced.boxes
        for i, name, is_plain in self._fit.written:
            value = self._mine[name]
            if self._kept is None:
                self._places[i].append(place_of(value))
            else:
                self._places[i].append(Place(value.detach() if value.requires_grad else value, boxes[i], is_plain))
        for (i, dtype), names in self._fit.made.items():
            tensor = self._make(i, dtype)
            for name in names:
                self._new[name] = tensor
        if self._kept is not None:
            self._kept.value = self._fit

    def _check_apart(self, fit: _Fit) -> None:
        """Check the one thing that equal layouts do not show: whether different tensors share memory."""
        written = {name: self._mine[name] for _, name, _ in fit.written}
        if overlap(list(written.values())) is not None:
            Leaves(written).check_writable()  # raises, and names them

    def _found(self) -> _Fit:
        fit = _Fit(
            [], {(self._announced.index[key], self._announced.entry(key).dtype): [] for key in self._announced.extra()}
        )
        seen: set[tuple[int, Any]] = set()
        written: dict[str, torch.Tensor] = {}
        for name in self._coming:
            if (i := self._entry(name)) is None:
                continue
            value = self._mine.get(name)
            if self._into.is_writable(name):
                place = place_of(self._mine[name])
                if (there := (i, memory_of(place.tensor))) not in seen:  # else tied here as on the source
                    seen.add(there)
                    fit.written.append((i, name, place.is_plain))
                    written[name] = place.tensor
                continue
            if isinstance(value, torch.Tensor) and is_sharded(value):
                raise ValueError(
                    f"[{name!r}] is a DTensor without memory of its own; call model.to_empty(device=…) first"
                )
            dtype = self._announced.entries[i].dtype if value is None else value.dtype
            fit.made.setdefault((i, dtype), []).append(name)
        Leaves(written).check_writable()
        return fit

    def _make(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        device = self._announced.kinds[i] if self._wanted.device is None else self._wanted.device
        tensor = new(self._announced.entries[i].shape, dtype, device, self._wanted.pin)
        self._places[i].append(Place(tensor, self._announced.boxes[i], tensor.is_cpu))
        return tensor

    def buffer(self, message: Message, there: torch.device) -> torch.Tensor:
        """Return the memory for a message: its final place if possible, otherwise a temporary buffer."""
        if len(message.parts) == 1:
            (part,) = message.parts
            for place in self._places[part.entry]:
                if (direct := place.direct(part, self._announced.dtypes[part.entry], there)) is not None:
                    return direct
        return memory.empty([message.nbytes], torch.uint8, there)

    def take(self, message: Message, buffer: torch.Tensor) -> None:
        """Write a message that did not arrive in its final place."""
        start, at = 0, buffer.data_ptr() if buffer.is_cpu else 0
        targets, values = [], []
        for part in message.parts:
            dtype = self._announced.dtypes[part.entry]
            for place in self._places[part.entry]:
                if at and place.is_plain and place.tensor.dtype == dtype and place.box == part.block:
                    if (there := place.tensor.data_ptr()) != at + start:
                        memory.copy(there, at + start, part.nbytes)
                    continue
                pair = place.view(part, part.of(buffer, start, dtype))
                if pair is not None and (pair[0].is_neg() or pair[0].is_conj()):  # _foreach_copy_ takes neither
                    pair[0].copy_(pair[1])
                elif pair is not None and pair[0].data_ptr() != pair[1].data_ptr():
                    targets.append(pair[0])
                    values.append(pair[1])
            start += part.nbytes
        if targets:  # copies from a GPU into pinned memory do not block the next message
            is_behind = self._wanted.pin and not buffer.is_cpu
            foreach_copy(targets, values, non_blocking=is_behind)
            self._behind |= {buffer.device} if is_behind else set()

    def finish(self) -> Any:
        """Store everything that has arrived, and return the result of the call."""
        for device in self._behind:
            torch.accelerator.synchronize(device)
        written = [self._mine[name] for _, name, _ in self._fit.written] if self._fit else []
        if self._kept is None:  # else they are plain tensors, and none is an inference tensor
            written = [local(one) for one in written if not one.is_inference()]
        torch.autograd.graph.increment_version(written)
        found = self._new | self._extra()
        arrived = {name: found[name] for name in self._coming if name in found}  # in the source's order
        return self._into.fill(arrived, self._coming if self._wanted.grow else None)

    def _extra(self) -> dict[str, Any]:
        """The entries that are no tensors."""
        if None not in self._announced.names.values():
            return {}
        tensors = {key: self._places[self._announced.index[key]][0].tensor for key in self._announced.extra()}
        decoded = outline.decode(self._announced.about["extra"], tensors, None)[0]
        return {name: decoded[self._coming[name]] for name in self._coming if self._entry(name) is None}


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def _described(value: Any) -> str:
    return _text(value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"
