"""Collectives through the slots, as generators that yield wherever they have to wait for other ranks.

All ranks run the same generators in the same order, so they count the steps and alternate the slots without agreement.
If the calls are compared (``calls``), each generator takes the word of its call, which is published with the data.
Otherwise the word is 0 on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from easydist.memory import copy
from easydist.shm.calls import Calls
from easydist.shm.slots import Need, Slots, unequal

Extent = tuple[int, int]
"""An address and a number of bytes."""

Piece = tuple[int, int, int]
"""An address, a number of bytes, and their offset in a slot."""


class Steps:
    """One rank's progress through the steps.

    Args:
        slots: The memory.
        calls: The calls of the ranks.
    """

    def __init__(self, slots: Slots, calls: Calls) -> None:
        self.slots, self._calls = slots, calls
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count on from a step that no rank has published, and after which no rank reads what was published before."""
        self._step = self._reached_by_all = step
        self._half = 0
        self._read_in = [-1, -1]

    def publish(self, half: int | None = None) -> int:
        """Publish the next step, in which the others read slot ``half``, and return its number."""
        self._step = step = self._step + 1
        if half is not None:
            self._read_in[half] = step
        self.slots.publish(step)
        return step

    def publish_data(self, half: int, nbytes: int, word: int) -> int:
        """Publish a step in which the others read slot ``half``, and the length of all data that it is a part of."""
        self._step = self._read_in[half] = step = self._step + 1
        self.slots.publish(step, (half, nbytes, word))
        return step

    def _differs(self, rank: int, half: int, nbytes: int, word: int) -> Exception:
        """Return the error if a rank has published another length, or the word of another call, with its slot."""
        found, _ = self.slots.published_with(rank, half)
        return self._calls.differ(word, rank, found, nbytes) if word else unequal(rank, found, nbytes)

    def all_reach(self, step: int) -> Iterator[Need]:
        """Wait until all ranks have published ``step``."""
        if step <= self._reached_by_all:
            return
        slots, need = self.slots, (step, self.slots.others)
        for rank in slots.others:
            while not slots.has_published(rank, step):
                yield need
        self._reached_by_all = step

    def next_half(self) -> int:
        """Return the slot to use next: the two slots alternate, in the same way on all ranks."""
        self._half ^= 1
        return self._half

    def own_slot(self, half: int) -> Generator[Need, None, int]:
        """Wait until no rank reads this rank's slot any more, and return its address."""
        # Each rank publishes a step only after it has read what it needs of the steps before.
        if self._read_in[half] >= self._reached_by_all:
            yield from self.all_reach(self._read_in[half] + 1)
        return self.slots.slots[self.slots.rank][half]

    def share(self, mine: Sequence[Extent], rows: Sequence[Sequence[Extent]], word: int) -> Iterator[Need]:
        """Fill the extents of ``rows[r]`` with the data of rank r.

        Args:
            mine: The extents of this rank's data, with as many bytes as ``rows[rank]``; they may be the same extents.
            rows: The target extents for each rank's data. Rows may differ in size; all ranks pass the same sizes.
            word: The word of the call.
        """
        slots, rank = self.slots, self.slots.rank
        given, taken = slotfuls(mine, slots.slot), [slotfuls(row, slots.slot) for row in rows]
        nbytes = [*map(_total, rows)]
        for index in range(max(1, *map(len, taken))):  # a step even for nothing: another rank may expect something
            slot = yield from self.own_slot(half := self.next_half())
            own = given[index] if index < len(given) else []
            for address, length, offset in own:
                copy(slot + offset, address, length)
            step = self.publish_data(half, nbytes[rank], word)
            # After publishing, so that the others copy at the same time.
            for (source, length, _), (target, _, _) in zip(own, taken[rank][index] if own else [], strict=True):
                if source != target:
                    copy(target, source, length)
            yield from self._collect(half, step, nbytes, taken, index, word)

    def share_small(self, mine: Extent, rows: Sequence[Extent], word: int) -> Iterator[Need]:
        """Do as ``share`` with one extent per rank, none larger than a slot."""
        slots, nbytes = self.slots, mine[1]
        slot = yield from self.own_slot(half := self.next_half())
        copy(slot, *mine)
        step = self.publish_data(half, nbytes, word)
        if (own := rows[slots.rank][0]) != mine[0]:
            copy(own, *mine)
        need = step, slots.others
        for rank in slots.others:
            while not slots.has_published(rank, step):
                yield need
            address, length = rows[rank]
            if not slots.holds(rank, half, length, word):
                raise self._differs(rank, half, length, word)
            copy(address, slots.slots[rank][half], length)
        self._reached_by_all = step

    def _collect(
        self,
        half: int,
        step: int,
        nbytes: Sequence[int],
        rows: Sequence[Sequence[Sequence[Piece]]],
        index: int,
        word: int,
    ) -> Iterator[Need]:
        slots, need = self.slots, (step, self.slots.others)
        for rank in slots.others:
            while not slots.has_published(rank, step):
                yield need
            if not slots.holds(rank, half, nbytes[rank], word):
                raise self._differs(rank, half, nbytes[rank], word)
            if index < len(rows[rank]):
                slot = slots.slots[rank][half]
                for address, length, offset in rows[rank][index]:
                    copy(address, slot + offset, length)
        self._reached_by_all = step

    def share_upto(self, rows: int, stride: int, nbytes: int, word: int) -> Iterator[Need]:
        """Fill each row with the message of its rank; this rank's row holds its message, of ``nbytes`` bytes.

        The first step carries the lengths, too. There are more steps only if a message is larger than a slot.

        Args:
            rows: The address of the first row.
            stride: The bytes from one row to the next.
            nbytes: The length of this rank's message.
            word: The word of the call.
        """
        slots, most = self.slots, self.slots.slot
        slot = yield from self.own_slot(half := self.next_half())
        copy(slot, rows + slots.rank * stride, nbytes if nbytes < most else most)
        step = self.publish_data(half, nbytes, word)
        need, lengths = (step, slots.others), [nbytes] * slots.size
        for rank in slots.others:
            while not slots.has_published(rank, step):
                yield need
            lengths[rank], found = slots.published_with(rank, half)
            if found != word:
                raise self._differs(rank, half, lengths[rank], word)
            copy(rows + rank * stride, slots.slots[rank][half], min(most, lengths[rank]))
        self._reached_by_all = step
        # All ranks know all lengths, so all of them take the same further steps.
        if max(lengths) > most:
            rest = [[(rows + r * stride + most, n - most)] for r, n in enumerate(lengths)]
            yield from self.share(rest[slots.rank], rest, word)

    def spread(self, extents: Sequence[Extent], root: int, word: int, copies: bool = True) -> Iterator[Need]:
        """Copy the data of ``root`` at its extents to those of the others; the sizes are the same on all ranks.

        Args:
            extents: The extents.
            root: The rank that has the data.
            word: The word of the call.
            copies: False on a rank that only takes the steps.
        """
        slots, nbytes = self.slots, _total(extents)
        for pieces in slotfuls(extents, slots.slot) or [[]]:
            half = self.next_half()
            if slots.rank == root:
                slot = yield from self.own_slot(half)
                for address, length, offset in pieces:
                    copy(slot + offset, address, length)
                # The root waits for nobody here, but in ``own_slot``, when it needs this slot again.
                self.publish_data(half, nbytes, word)
            else:
                yield from self._fetch(root, half, pieces if copies else [], nbytes, word)

    def _fetch(self, root: int, half: int, pieces: Sequence[Piece], nbytes: int, word: int) -> Iterator[Need]:
        slots, step = self.slots, self.publish()  # publishing allows others to overwrite slots that this rank has read
        need = (step, (root,))
        while not slots.has_published(root, step):
            yield need
        if not slots.holds(root, half, nbytes, word):
            raise self._differs(root, half, nbytes, word)
        slot = slots.slots[root][half]
        for address, length, offset in pieces:
            copy(address, slot + offset, length)

    def meet(self, word: int) -> Iterator[Need]:
        """Wait until all ranks have reached this point."""
        if not word:
            yield from self.all_reach(self.publish())
            return
        half = self.next_half()
        if self._read_in[half] >= self._reached_by_all:  # no rank publishes another word before all have read
            yield from self.own_slot(half)
        yield from self.reach_with(half, 0, word)

    def reach_with(self, half: int, nbytes: int, word: int) -> Iterator[Need]:
        """Publish slot ``half``, and wait until all ranks have published theirs, with data of the same length."""
        slots, step = self.slots, self.publish_data(half, nbytes, word)
        need = step, slots.others
        for rank in slots.others:
            while not slots.has_published(rank, step):
                yield need
        self._reached_by_all = step
        for rank in slots.others:
            if not slots.holds(rank, half, nbytes, word):
                raise self._differs(rank, half, nbytes, word)

    def close(self) -> None:
        """Release the memory; a generator that runs in another thread keeps it until it stops."""
        del self.slots, self._calls


def _total(extents: Sequence[Extent]) -> int:
    return extents[0][1] if len(extents) == 1 else sum(nbytes for _, nbytes in extents)


def slotfuls(extents: Sequence[Extent], slot: int) -> list[list[Piece]]:
    """Return the extents, concatenated and cut into parts that each fit a slot.

    Example:
        >>> slotfuls([(1000, 3), (2000, 6)], 4)
        [[(1000, 3, 0), (2000, 1, 3)], [(2001, 4, 0)], [(2005, 1, 0)]]
    """
    if len(extents) == 1 and 0 < extents[0][1] <= slot:
        return [[(*extents[0], 0)]]
    full: list[list[Piece]] = []
    pieces: list[Piece] = []
    room = slot
    for address, nbytes in extents:
        while nbytes > 0:
            length = min(nbytes, room)
            pieces.append((address, length, slot - room))
            address, nbytes, room = address + length, nbytes - length, room - length
            if not room:
                full.append(pieces)
                pieces, room = [], slot
    return [*full, pieces] if pieces else full
