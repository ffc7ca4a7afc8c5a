"""Transfer from ranks that hold a model in one layout to ranks that want it in another, each slice directly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from easydist.agreement.agree import shared
from easydist.agreement.call import Call
from easydist.agreement.disagreement import listed
from easydist.agreement.frames import Agreement
from easydist.agreement.reports import encoded, exchange_reports
from easydist.agreement.runner import Verb, run
from easydist.base.torch_private import is_zerotensor
from easydist.base.wording import a_or_an
from easydist.data.aliasing import sharing
from easydist.data.backing import backed, is_backed, mark_written
from easydist.data.leaves import as_tensor
from easydist.data.packing import dtype_name, sort_key
from easydist.errors import DisagreementError
from easydist.groups.communicators import Communicators
from easydist.groups.pickled import OfThisProcess
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.weights.blocks import Block, BlockTransfer, Delivery, block_transfers
from easydist.weights.exchange import BUCKET_NBYTES
from easydist.weights.receivers import entries_of
from easydist.weights.schedule import Packet, ScheduledEntry, UnderWay, bucket, schedule
from easydist.weights.shards import is_tensor, local, memory_of
from easydist.weights.source import casts, packed
from easydist.weights.spans import Destinations, Span, check_writable, span_at, span_of

__all__ = ["Resharding"]

_CPU = torch.device("cpu")


class Resharding(OfThisProcess):
    """A repeatable transfer of weights from one layout to another. The plan of its slices is computed once.

    Law: after ``run`` every target tensor holds the values that the source tensor of that name has there, cast to its
    dtype; of several names of one tensor the last one counts. Each slice goes directly from a rank that holds it to the
    one that wants it, and nothing else travels.

    All ranks of the group create it and run it together. Names that only sources have are ignored. It uses the tensors
    that existed when it was created; optimizers change them in place.

    Args:
        source: The weights that this rank holds: a module or a dict of tensors, DTensors and local shards; or None.
        target: The weights that this rank wants, in the same form. The tensors are written in place.
        group: The participating ranks.
        bucket_bytes: The most bytes in transit, and copied on the way, per rank.
        timeout: How long the ranks may take to meet.

    Attributes:
        transfers: The transfers of each name, the same on all ranks.

    Raises:
        DisagreementError: No rank holds a target's name, its shape or dtype differs, or the held blocks do not cover
            the tensor.
        RemoteError: A rank's tensors cannot be sent or written.
        ValueError: ``bucket_bytes`` is too small.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> whole, part = torch.arange(4.0), torch.zeros(2)
        >>> resharding = weights.Resharding({"w": whole}, {"w": weights.LocalShard(part, (2,), (4,))})
        >>> resharding.run()
        >>> part
        tensor([2., 3.])

    Cost: one header exchange and one all-gather of the layouts, as JSON.
    """

    def __init__(
        self,
        source: Any = None,
        target: Any = None,
        *,
        group: Group = None,
        bucket_bytes: int = BUCKET_NBYTES,
        timeout: Timeout | None = None,
    ) -> None:
        self._comms = communicators(group)
        planning = _Planning(source, target, bucket_bytes)
        self.transfers: dict[str, list[BlockTransfer]] = run(planning, self._comms, timeout)
        self._dtypes, self._bucket_nbytes = planning.dtypes, planning.bucket_nbytes
        held, wanted = planning.spans
        # Of several names in one memory the last one stays, as after load_state_dict.
        last = {memory_of(span.tensor): name for name, span in wanted.items()}
        wanted = {name: span for name, span in wanted.items() if last[memory_of(span.tensor)] == name}
        self._held = [held.get(name) for name in self._dtypes]
        self._destinations = Destinations([*self._dtypes.values()])
        for name, spans in zip(self._dtypes, self._destinations.spans, strict=True):
            spans += [wanted[name]] if name in wanted else []
        self._nbytes = planning.nbytes
        self._packets = self._scheduled(self._comms.rank)

    def _scheduled(self, rank: int) -> list[Packet]:
        """Return a rank's packets. Each pair has its turn, the same on both ranks, and waits cannot form a cycle."""
        own = {name: [one for one in self.transfers[name] if rank in one[:2]] for name in self._dtypes}
        items = [
            ScheduledEntry(dtype, "cpu", [Delivery(src, (dst,), block) for src, dst, block in own[name]])
            for name, dtype in self._dtypes.items()
        ]
        turns: Counter[tuple[int, tuple[int, ...]]] = Counter()
        order = []
        for packet in schedule(items, self._bucket_nbytes):
            turns[pair := packet[:2]] += 1
            order.append((turns[pair], pair, packet))
        return [packet for *_, packet in sorted(order, key=lambda one: one[:2])]

    def run(self, *, timeout: Timeout | None = None) -> None:
        """Move the current values.

        Args:
            timeout: The time limit of the call; None is the group's.

        Raises:
            EasydistError: A rank was lost or late, or called something else.

        Cost: one header exchange, then one message between two ranks for each slice of 256 KiB or more, in pieces of a
        quarter of ``bucket_bytes``, and one for all smaller ones of a pair. Tensors on GPUs travel through the CPU.
        """
        moving = _Moving(self._packets, self._nbytes, self._dtypes, self._held, self._destinations, self._bucket_nbytes)
        run(moving, self._comms, timeout)

    def nbytes(self, src: int, dst: int) -> int:
        """Return the bytes that one ``run`` sends from one rank to another.

        Args:
            src: The rank that sends.
            dst: The rank that receives.
        """
        return sum(
            one.block.numel * self._dtypes[name].itemsize
            for name, transfers in self.transfers.items()
            for one in transfers
            if (one.src, one.dst) == (src, dst)
        )


def _spans(given: Any) -> dict[str, tuple[Span, tuple[int, ...]]]:
    """Return by name this rank's span of an entry, and the shape of the whole."""
    found = {}
    for name, value in entries_of(given).values.items():
        if not is_tensor(value):
            raise TypeError(f"[{name!r}] is {a_or_an(type(value).__name__)}; only tensors are laid out over ranks")
        as_tensor(local(value), f"[{name!r}]")
        found[name] = span_of(value, name), tuple(value.shape)
    return found


def _check_apart(held: Mapping[str, Span], wanted: Mapping[str, Span]) -> None:
    """Check that what is written is not yet to be sent: only a block may take the place of itself.

    Raises:
        ValueError: It may be.
    """
    names = [*held], [*wanted]
    for i, j in sharing([one.tensor for one in held.values()], [one.tensor for one in wanted.values()]):
        source, target = names[0][i], names[1][j]
        if source != target or held[source].box != wanted[target].box:
            raise ValueError(
                f"the target [{target!r}] shares memory with the source [{source!r}], which it would change"
            )


class _Planning(Verb[dict[str, list[BlockTransfer]]]):
    """The exchange of the ranks' layouts, from which each computes the same plan."""

    operation = "Resharding"

    def __init__(self, source: Any, target: Any, bucket_nbytes: int) -> None:
        self._given, self.bucket_nbytes = (source, target), bucket_nbytes
        self.dtypes: dict[str, torch.dtype] = {}
        self.nbytes = 0
        self.spans: list[dict[str, Span]] = []

    def prepare(self, comms: Communicators) -> Call:
        self.bucket_nbytes = bucket(self.bucket_nbytes)
        found = [_spans(given) for given in self._given]
        check_writable({name: span for name, (span, _) in found[1].items()})
        for name, (span, shape) in found[0].items():
            if is_zerotensor(span.tensor):
                found[0][name] = span_at(span.tensor.clone(), span.box), shape
        self.spans = [{name: span for name, (span, _) in one.items()} for one in found]
        _check_apart(*self.spans)
        self._mine = encoded(
            {
                side: {name: [dtype_name(span.tensor.dtype), shape, *span.box] for name, (span, shape) in one.items()}
                for side, one in zip(("held", "wanted"), found, strict=True)
            }
        )
        return Call({"bucket_bytes": self.bucket_nbytes}, nbytes=self._mine.numel())

    def exchange(self, comms: Communicators, agreed: Agreement) -> dict[str, list[BlockTransfer]]:
        every = exchange_reports(comms, agreed.nbytes, self._mine)
        held, wanted = ({rank: one[side] for rank, one in every.items()} for side in ("held", "wanted"))
        names = {name for one in wanted.values() for name in one}
        types: dict[str, Any] = {name: one[name][:2] for one in held.values() for name in sorted(one) if name in names}
        if wrong := _wrong(names, types, held, wanted):
            lines = ["Resharding: the layouts do not fit", *listed(wrong)]
            raise shared(comms, DisagreementError("\n".join(lines)))
        self.dtypes = {name: getattr(torch, types[name][0]) for name in sorted(types)}
        self.dtypes = dict(sorted(self.dtypes.items(), key=lambda one: (sort_key(one[1]), one[0])))
        boxes = {name: _blocks(name, wanted) for name in self.dtypes}
        self.nbytes = sum(self.dtypes[name].itemsize * box.numel for name, some in boxes.items() for _, box in some)
        load: dict[int, int] = {}
        try:
            return {
                name: block_transfers(tuple(types[name][1]), _blocks(name, held), boxes[name], load)
                for name in self.dtypes
            }
        except ValueError as error:
            raise shared(comms, DisagreementError(f"Resharding: {error}")) from None

    def result(self, comms: Communicators, agreed: Agreement, arrived: Any) -> dict[str, list[BlockTransfer]]:
        plans: dict[str, list[BlockTransfer]] = arrived
        return plans


_Side = Mapping[int, Mapping[str, Any]]


def _blocks(name: str, side: _Side) -> tuple[tuple[int, Block], ...]:
    return tuple([(rank, Block(*map(tuple, one[name][2:]))) for rank, one in side.items() if name in one])


def _wrong(names: set[str], types: Mapping[str, Any], held: _Side, wanted: _Side) -> list[str]:
    """Describe the entries that do not fit, one per line."""
    lines = [f"  {name}  is wanted, but no rank holds it" for name in sorted(names - types.keys())]
    for side, what in ((held, "holds"), (wanted, "wants")):
        for rank, one in side.items():
            for name in sorted(one.keys() & types.keys()):
                (dtype, shape), (theirs, there) = types[name], one[name][:2]
                fits = casts(getattr(torch, dtype), getattr(torch, theirs)) if side is wanted else dtype == theirs
                if shape != there or not fits:
                    lines.append(f"  {name}  is {dtype} {tuple(shape)}, rank {rank} {what} {theirs} {tuple(there)}")
    return lines


class _Moving(Verb[None]):
    """The transfer of a rank's packets, those of each pair in the same order on both ranks."""

    operation = "Resharding.run"

    def __init__(
        self,
        packets: Sequence[Packet],
        nbytes: int,
        names: Iterable[str],
        held: Sequence[Span | None],
        destinations: Destinations,
        bucket_nbytes: int,
    ) -> None:
        self._packets, self._nbytes, self._names, self._bucket_nbytes = packets, nbytes, names, bucket_nbytes
        self._held, self._destinations = held, destinations

    def prepare(self, comms: Communicators) -> Call:
        for name, held, wanted in zip(self._names, self._held, self._destinations.spans, strict=True):
            for span in [held, *wanted]:
                if span is not None and not is_backed(span.tensor):  # FSDP may have freed it since the plan was made
                    backed(span.tensor, f"leaf [{name!r}]")
        return Call({"bytes": self._nbytes})

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        def take(packet: Packet, buffer: torch.Tensor) -> None:
            if comms.rank in packet.ranks:
                self._destinations.take(packet, buffer)

        cpu = comms.cpu(self._nbytes)
        under_way = UnderWay(self._bucket_nbytes, take)
        for packet in self._packets:
            src, (dst,) = packet.root, packet.ranks
            under_way.admit(packet)
            if src == dst:
                take(packet, self._load(packet, None))
                continue
            buffer = self._load(packet, _CPU) if comms.rank == src else self._destinations.buffer(packet, _CPU)
            work = cpu.send(buffer, dst, async_op=True) if comms.rank == src else cpu.recv(buffer, src, async_op=True)
            under_way.add(packet, buffer, work)
        under_way.finish()
        self._destinations.synchronize()

    def _load(self, packet: Packet, there: torch.device | None) -> torch.Tensor:
        """Return the bytes of a packet on a device; None is the one that holds them."""
        pieces = [(part.block, self._held[part.entry]) for part in packet.parts]
        held = [block.within(span.box).of(span.tensor) for block, span in pieces if span is not None]
        values = [*map(backed, held)]  # conjugate and negative views as their values
        return packed(values, values[0].device if there is None else there)

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> None:
        mark_written(span.tensor for spans in self._destinations.spans for span in spans)
