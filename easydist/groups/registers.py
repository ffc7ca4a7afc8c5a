"""The registers of ranks that recover a group, on their pages or in the group's store.

Ranks of one host use their pages, which outlive the store and the processes: a process that has mapped a page can read
it for as long as that process lives. Ranks of several hosts have only the store. The choice follows from the records
that all ranks exchanged when they met, so it is the same on all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from easydist.groups.membership import Decision, Register, Stage
from easydist.liveness.page import OwnPage
from easydist.liveness.peer import Peer, host_id
from easydist.liveness.stored import damaged, decoded, in_store
from easydist.liveness.timed_store import TimedStore


class RecoveryState(NamedTuple):
    """The state of a recovering rank, as the others read it.

    Attributes:
        register: The rank's register in the agreement.
        host: A text that is equal for ranks of one host.
        address: Where the members of the new group meet if this rank is the first of them: the port of the store that
            it serves, or the prefix of a part of the old group's.
    """

    register: Register = Register()
    host: str = ""
    address: str = ""

    def to_json(self) -> str:
        """Return it as JSON.

        Example:
            >>> told = RecoveryState(Register(Stage.READY, 1, (0, 2), False, 5, 5, True), "a", "7")
            >>> told.to_json()
            '[3, 1, "5", false, 5, 5, true, "a", "7"]'
            >>> RecoveryState.from_json(told.to_json()) == told
            True
        """
        stage, slot, members, is_settled, ballot, accepted, value = self.register
        numbers = int(stage), slot, _packed(members), is_settled, ballot, accepted, _packed(value)
        return json.dumps([*numbers, self.host, self.address])

    @classmethod
    def from_json(cls, text: str | bytes | None, what: str = "a register") -> RecoveryState:
        """Return the state in a JSON text; an empty text means that the rank has not come.

        Raises:
            WireError: The text is no such state; the error names it by ``what``.
        """
        if not text:
            return cls()
        stage, slot, members, is_settled, ballot, accepted, value, host, address = decoded(what, text, _FORM)
        try:
            register = Register(Stage(stage), slot, _members(members), is_settled, ballot, accepted, _unpacked(value))
        except ValueError:
            raise damaged(what, text) from None
        return cls(register, host, address)


_FORM = (int, int, str, bool, int, int, str | bool | None, str, str)


def _packed(value: Decision | None) -> str | bool | None:
    return format(sum(1 << rank for rank in value), "x") if isinstance(value, tuple) else value


def _members(bits: str) -> tuple[int, ...]:
    number = int(bits, 16)
    return tuple(rank for rank in range(number.bit_length()) if number >> rank & 1)


def _unpacked(value: str | bool | None) -> Decision | None:
    return _members(value) if isinstance(value, str) else value


def this_host() -> str:
    """Return a short text that is equal for ranks of one host."""
    return hashlib.blake2b(host_id().encode(), digest_size=6).hexdigest()


class Registers(Protocol):
    """The registers of all ranks."""

    def write(self, told: RecoveryState) -> None:
        """Write this rank's register."""

    def read(self) -> list[RecoveryState] | None:
        """Read all registers; return None if they cannot be read now."""


class PageRegisters:
    """The registers on the pages of ranks that are on one host.

    Args:
        page: The page of this process.
        entry: The group's entry on the page.
        rank: The rank of this process in the group.
        peers: The other ranks.
    """

    def __init__(self, page: OwnPage, entry: int, rank: int, peers: Mapping[int, Peer]) -> None:
        self._page, self._entry, self._rank, self._peers = page, entry, rank, peers
        self._mine = RecoveryState()

    def write(self, told: RecoveryState) -> None:
        """Write this rank's register.

        Raises:
            ValueError: The group has too many ranks for the page.
        """
        self._mine = told
        self._page.set_register(self._entry, told.to_json())

    def read(self) -> list[RecoveryState]:
        """Read all registers."""
        size = len(self._peers) + 1
        return [
            self._mine if r == self._rank else RecoveryState.from_json(self._peers[r].register()) for r in range(size)
        ]


class StoreRegisters:
    """The registers in the group's store.

    Args:
        store: The group's store.
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        page: The page of this process. Its register is written there, too, so that ranks of one host can continue on
            their pages if the store ends.
        entry: The group's entry on the page.
    """

    def __init__(self, store: TimedStore, rank: int, size: int, page: OwnPage | None, entry: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._page, self._entry = page, entry
        self._mine = RecoveryState()

    def write(self, told: RecoveryState) -> None:
        """Write this rank's register; if the store does not answer, later, but before anything is read.

        Raises:
            RuntimeError: The store is gone.
        """
        self._mine = told
        # Before the store: if it ends now, the others continue on the pages, with all that was decided in it.
        if self._page is not None and self._entry >= 0:
            with contextlib.suppress(ValueError):  # the group may be too large for pages
                self._page.set_register(self._entry, told.to_json())
        self._store.set(f"recover/{self._rank}", told.to_json())

    def read(self) -> list[RecoveryState] | None:
        """Read all registers; return None if the store does not answer.

        Raises:
            RuntimeError: The store is gone.
        """
        found = []
        for rank in range(self._size):
            text = None if rank == self._rank else self._store.get(key := f"recover/{rank}", rank)
            if rank != self._rank and not self._store.has_answered:
                return None
            found.append(self._mine if rank == self._rank else RecoveryState.from_json(text, in_store(key)))
        return found


def are_on_one_host(peers: Mapping[int, Peer], entry: int) -> bool:
    """True if, by their records, all ranks are on this host and have a page; the same on all ranks."""
    return entry >= 0 and all(peer.shares_pages for peer in peers.values())


def unseen(peers: Mapping[int, Peer]) -> list[int]:
    """Return the living ranks on this host with pages that this process may not open."""
    return [peer.rank for peer in peers.values() if not (peer.is_visible or peer.is_gone())]
