"""The receiver's side: comparing the arriving entries with its own, then writing them, or handing them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from easydist.agreement.disagreement import Row, listed, misfit_lines
from easydist.base.recent import Recent
from easydist.base.wording import some
from easydist.data.aliasing import overlap
from easydist.data.leaves import Leaves
from easydist.data.packing import type_text
from easydist.format import outline
from easydist.typing import Device
from easydist.verbs.sharded import is_sharded
from easydist.weights.blocks import Block
from easydist.weights.manifest import Manifest
from easydist.weights.receivers import entries_of
from easydist.weights.schedule import Packet
from easydist.weights.shards import check_dense, is_tensor, local, memory_of
from easydist.weights.source import Filter, Rename, casts, layout_key, named
from easydist.weights.spans import Destinations, Span, check_writable, new, span_of


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
        replaced: The names that are not written, because another entry is, to the same memory.
    """

    written: list[tuple[int, str, bool]]
    made: dict[tuple[int, torch.dtype], list[str]]
    replaced: set[str]


_fits: Recent[_Fit] = Recent(4)


class Target:
    """The receiver's side of one call.

    Args:
        into: A module or dict whose tensors are written; None or an empty dict: all are new.
        manifest: The arriving entries.
        wanted: The receiver's settings.

    Attributes:
        destinations: The memory into which the entries arrive, after ``allocate``.

    Raises:
        TypeError: ``into`` is neither.
        ValueError: Two entries get one name.

    Cost: 10 µs for each entry; 3 µs if a receiver like it has received entries like these before.
    """

    def __init__(self, into: Any, manifest: Manifest, wanted: Wanted) -> None:
        self._manifest, self._wanted, self._into = manifest, wanted, entries_of(into)
        self._mine = self._into.values
        self._takes_all = wanted.grow or not (self._mine or isinstance(into, nn.Module))
        self._is_strict = wanted.strict and not self._takes_all
        names = named(manifest.names, wanted.keep, wanted.rename)
        self._coming = {m: n for n, m in names.items() if self._takes_all or wanted.strict or m in self._mine}
        self.destinations = Destinations(manifest.dtypes, wanted.pin)
        self._new: dict[str, torch.Tensor] = {}
        self._key = self._fit_key()
        self._fit = None if self._key is None else _fits.find(self._key)

    def _fit_key(self) -> Hashable | None:
        """Return the key of the fit; None if it must be computed each time."""
        like = layout_key(list(self._mine.values()))
        changes = (*self._coming, *self._coming.values()) if self._wanted.keep or self._wanted.rename else None
        rules = self._is_strict, self._takes_all, self._wanted.strict
        if like is None or not self._manifest.is_kept:
            return None
        return self._manifest, like, tuple(self._mine), self._into.own, rules, changes

    def misfit(self) -> list[Row]:
        """Return the differences between arriving entries and the receiver's, sorted by name; empty if all fit."""
        if self._fit is not None:
            return []
        compared = self._mine.keys() if self._is_strict else self._mine.keys() & self._coming.keys()
        check_dense({name: self._mine[name] for name in compared if self._into.is_writable(name)})
        if rows := self._into.misfit(self._manifest.about.get("optimizer")):
            return rows
        rows = [row for name in self._coming if (row := self._compared(name)) is not None]
        if self._is_strict:
            absent = [(name, value) for name, value in self._mine.items() if name not in self._coming]
            filled = {memory_of(self._mine[name]) for name in self._coming if absent and name in self._mine}
            rows += [(name, "missing", _described(one)) for name, one in absent if memory_of(one) not in filled]
        return sorted(rows)

    def _entry(self, name: str) -> int | None:
        """Return the entry that arrives under a name; None if it is not a tensor."""
        key = self._manifest.names[self._coming[name]]
        return None if key is None else self._manifest.index[key]

    def _compared(self, name: str) -> Row | None:
        i = self._entry(name)
        entry = None if i is None else self._manifest.entries[i]
        theirs = "no tensor" if entry is None else type_text(entry.dtype, entry.shape)
        if name not in self._mine:
            return (name, theirs, "missing") if self._is_strict else None
        value = self._mine[name]
        if entry is None or not is_tensor(value):
            fits = entry is None and not is_tensor(value)
        else:
            fits = tuple(value.shape) == entry.shape and casts(entry.dtype, value.dtype)
        return None if fits else (name, theirs, _described(value))

    def allocate(self) -> None:
        """Find or create the memory for all entries, before the first byte arrives.

        Raises:
            RuntimeError: There is not enough memory, or no such device.
            ValueError: A tensor of ``into`` cannot be written.
        """
        if is_new := self._fit is None:
            self._fit = self._found()
        else:
            self._check_disjoint(self._fit)
        boxes, spans = self._manifest.boxes, self.destinations.spans
        for i, name, is_plain in self._fit.written:
            value = self._mine[name]
            if self._key is None:
                spans[i].append(span_of(value, name))
            else:
                spans[i].append(Span(value.detach() if value.requires_grad else value, boxes[i], is_plain))
        for (i, dtype), names in self._fit.made.items():
            tensor = self.make(i, dtype)
            for name in names:
                self._new[name] = tensor
        if is_new and self._key is not None:
            _fits.keep(self._key, self._fit)

    def _check_disjoint(self, fit: _Fit) -> None:
        """Check the one thing that equal layouts do not show: whether different tensors share memory."""
        written = {name: self._mine[name] for _, name, _ in fit.written}
        if overlap(list(written.values())) is not None:
            Leaves(written).check_writable()  # raises, and names them

    def _found(self) -> _Fit:
        fit = _Fit(
            [],
            {(self._manifest.index[key], self._manifest.entry(key).dtype): [] for key in self._manifest.extra()},
            set(),
        )
        spans = {name: span_of(self._mine[name], name) for name in self._mine if self._is_written(name)}
        check_writable(spans)
        # Of several entries that arrive in one memory, the last one stays, as after load_state_dict.
        last = {memory_of(span.tensor): self._entry(name) for name, span in spans.items()}
        seen: set[Any] = set()
        for name in self._coming:
            if (i := self._entry(name)) is None:
                continue
            if (span := spans.get(name)) is not None:
                if last[place := memory_of(span.tensor)] != i:
                    fit.replaced.add(name)
                elif place not in seen:  # else tied here as on the source
                    seen.add(place)
                    fit.written.append((i, name, span.is_plain))
                continue
            value = self._mine.get(name)
            if isinstance(value, torch.Tensor) and is_sharded(value):
                raise ValueError(
                    f"[{name!r}] is a DTensor without memory of its own; call model.to_empty(device=…) first"
                )
            dtype = self._manifest.entries[i].dtype if value is None else value.dtype
            fit.made.setdefault((i, dtype), []).append(name)
        return fit

    def _is_written(self, name: str) -> bool:
        """True if a tensor arrives that is written to this entry of the receiver's in place."""
        return name in self._coming and self._entry(name) is not None and self._into.is_writable(name)

    @property
    def replaced(self) -> Set[str]:
        """The receiver's names to which nothing is written, because another entry is, in the same memory."""
        return frozenset() if self._fit is None else self._fit.replaced

    def parts(self) -> dict[str, Block | None]:
        """Return the block to receive of each entry of which this is not all, after ``allocate``; None is nothing.

        An entry that is tied on the source may arrive in different blocks here: then all of it is received.
        """
        found: dict[str, Block | None] = {}
        for entry, box, spans in zip(
            self._manifest.entries, self._manifest.boxes, self.destinations.spans, strict=True
        ):
            if not spans:
                found[entry.name] = None
            elif spans[0].box != box and all(span.box == spans[0].box for span in spans):
                found[entry.name] = spans[0].box
        return found

    def make(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate the memory of an entry."""
        device = self._manifest.kinds[i] if self._wanted.device is None else self._wanted.device
        tensor = new(self._manifest.entries[i].shape, dtype, device, self._wanted.pin)
        self.destinations.spans[i].append(Span(tensor, self._manifest.boxes[i], tensor.is_cpu))
        return tensor

    def buffer(self, packet: Packet, there: torch.device) -> torch.Tensor:
        """Return the memory in which a packet arrives."""
        return self.destinations.buffer(packet, there)

    def take(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Write a packet that has arrived."""
        self.destinations.take(packet, buffer)

    def complete(self) -> Iterable[tuple[str, Any]]:
        """Return the entries to hand over now: none, as all stay here."""
        return ()

    def rest(self, only: Container[str] | None) -> Iterable[tuple[str, Any]]:
        """Return the entries to hand over at the end, because no packet holds them: none.

        Args:
            only: The keys of the entries that travel; None means all.
        """
        return ()

    def finish(self) -> Any:
        """Store everything that has arrived, and return the result of the call."""
        self.destinations.synchronize()
        written = [self._mine[name] for _, name, _ in self._fit.written] if self._fit else []
        if self._key is None:  # else they are plain tensors, and none is an inference tensor
            written = [one for one in map(local, written) if not one.is_inference()]
        torch.autograd.graph.increment_version(written)
        found = self._new | self.extra()
        arrived = {name: found[name] for name in self._coming if name in found}  # in the source's order
        return self._into.fill(arrived, self._coming if self._wanted.grow else None)

    def extra(self) -> dict[str, Any]:
        """Return the entries that are not tensors."""
        if None not in self._manifest.names.values():
            return {}
        spans, index = self.destinations.spans, self._manifest.index
        tensors = {key: spans[index[key]][0].tensor for key in self._manifest.extra()}
        decoded = outline.decode(self._manifest.about["extra"], tensors, None)[0]
        return {name: decoded[self._coming[name]] for name in self._coming if self._entry(name) is None}


class StreamTarget(Target):
    """The receiver's side of a call that hands over each entry once it is complete, and keeps nothing.

    Args:
        manifest: The arriving entries.

    Cost: the memory of the entries that are under way.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(None, manifest, Wanted())
        self._missing = [box.numel for box in manifest.boxes]
        self._complete: deque[int] = deque()
        self._names: dict[str | None, list[str]] = {}
        for name, key in manifest.names.items():
            self._names.setdefault(key, []).append(name)

    def allocate(self) -> None:
        """Make sure that there are the devices for the entries, whose memory comes later."""
        for kind in {*self._manifest.kinds}:
            new((1,), torch.uint8, kind, False)

    def parts(self) -> dict[str, Block | None]:
        """Return nothing: all of every entry arrives."""
        return {}

    def buffer(self, packet: Packet, there: torch.device) -> torch.Tensor:
        """Return the memory in which a packet arrives, after allocating that of its entries."""
        for part in packet.parts:
            if not self.destinations.spans[part.entry]:
                self.make(part.entry, self._manifest.dtypes[part.entry])
        return super().buffer(packet, there)

    def take(self, packet: Packet, buffer: torch.Tensor) -> None:
        """Write a packet, and note which entries it completes."""
        super().take(packet, buffer)
        for part in packet.parts:
            self._missing[part.entry] -= part.block.numel
            if not self._missing[part.entry]:
                self._complete.append(part.entry)

    def complete(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that are complete, under all their names, and forget them."""
        while self._complete:
            yield from self._named(self._complete.popleft())

    def rest(self, only: Container[str] | None) -> Iterator[tuple[str, Any]]:
        """Yield the tensors without elements, and the entries that are not tensors."""
        for i, entry in enumerate(self._manifest.entries):
            if not self._manifest.boxes[i].numel and (only is None or entry.name in only):
                self.make(i, entry.dtype)
                yield from self._named(i)
        yield from self.extra().items()

    def _named(self, i: int) -> Iterator[tuple[str, Any]]:
        names = self._names.get(self._manifest.entries[i].name)
        if names is None:  # a tensor inside of an entry, which needs it at the end
            return
        (span,) = self.destinations.spans[i]
        self.destinations.spans[i] = []
        for name in names:
            yield name, span.tensor


def _described(value: Any) -> str:
    return type_text(value.dtype, value.shape) if is_tensor(value) else "no tensor"


def disagreement(operation: str, source: str, misfits: Mapping[int, Sequence[Row]], advice: str) -> str:
    """Describe the entries of receivers or further sources that differ from the first source's, one per line."""
    lines = misfit_lines(source, misfits)
    title = f"{operation}: ranks disagree on {some(len(lines), 'entry', 'entries')}"
    return "\n".join([title, *listed(lines), f"Nothing was written. {advice}"])
