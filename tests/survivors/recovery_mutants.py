"""Single-line faults of the modules that agree on survivors, put in on purpose: each must break a law of a simulation.

A mutant is a text of one function, and the text that takes its place when the module is loaded. ``FOUND`` has the
schedules that notice them.
"""

import importlib
import inspect
import sys
import types
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        where: The function, in its class.
        old: The text that it has, which occurs once.
        new: The text in its place.
        is_safety: True if it breaks agreement or validity, not only the promises about time.
    """

    where: str
    old: str
    new: str
    is_safety: bool = True


def mutated(name, mutant):
    """Load a module again, with a fault.

    Args:
        name: The full name of the module.
        mutant: The fault; None for none.
    """
    original = importlib.import_module(name)
    source = inspect.getsource(original)
    if mutant is not None:
        source = _changed(source, original, mutant)
    module = types.ModuleType(name)
    module.__file__ = original.__file__
    before, sys.modules[name] = sys.modules[name], module  # dataclasses look their module up
    try:
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    finally:
        sys.modules[name] = before
    return module


def _changed(source, module, mutant):
    found = module
    for part in mutant.where.split("."):
        found = getattr(found, part)
    text = inspect.getsource(found)
    if text.count(mutant.old) != 1 or source.count(text) != 1:
        raise LookupError(f"{mutant.where} has not one place for {mutant.old!r}")
    return source.replace(text, text.replace(mutant.old, mutant.new))


IN = "Membership."

MEMBERSHIP = {
    "ballots are not unique": Mutant(IN + "_propose", " + self._rank  #", "  #"),
    "a ballot need not be the highest": Mutant(IN + "_propose", "register.ballot for", "register.accepted for"),
    "accepted ballots are compared, not promised ones": Mutant(
        IN + "_compare", "max(register.ballot for register", "max(register.accepted for register"
    ),
    "an equal ballot is a higher one": Mutant(IN + "_compare", " > self._mine.ballot", " >= self._mine.ballot", False),
    "registers are not read again": Mutant(IN + "_compare", "self._ballot = Ballot.ACCEPTED", "self._decided(now)"),
    "its own wish goes first": Mutant(IN + "_compare", "last.value if last.accepted else self._wished", "self._wished"),
    "the oldest value is adopted": Mutant(IN + "_compare", "last = max(", "last = min("),
    "the value of the highest promise is adopted": Mutant(
        IN + "_compare", "key=lambda register: register.accepted", "key=lambda register: register.ballot"
    ),
    "accepting is not recorded": Mutant(IN + "_compare", "accepted=self._mine.ballot, ", ""),
    "it goes on though others have promised more": Mutant(IN + "_compare", "self._ballot = Ballot.NONE", "pass"),
    "ballots about other decisions count": Mutant(IN + "_peers", " if other.slot == self._mine.slot", ""),
    "its own register does not count": Mutant(IN + "_peers", "[self._mine, *[", "[*[Register()], *["),
    "not connected is taken for connected": Mutant(IN + "_decided", "bool(value)", "True"),
    "a stage is kept when slots are jumped": Mutant(
        IN + "_learn", "if is_settled and slot == self._mine.slot + 1", "if slot > self._mine.slot + 1"
    ),
    "a stage is kept from each decision to the next": Mutant(
        IN + "_learn", "if is_settled and slot == self._mine.slot + 1", "if slot == self._mine.slot + 1"
    ),
    "a settled decision is taken for the end of its own attempt": Mutant(
        IN + "_learn", "if is_settled and slot == self._mine.slot + 1", "if is_settled"
    ),
    "an unfinished ballot is carried to the next decision": Mutant(IN + "_learn", "self._ballot = Ballot.NONE", "pass"),
    "no stage is kept": Mutant(IN + "_learn", "stage = self._mine.stage", "pass", False),
    "the decision about connecting begins as HERE": Mutant(IN + "_learn", "if slot % 2 else", "if False else", False),
    "members grow": Mutant(IN + "_new_members", "self._mine.members or range(self._size)", "range(self._size)"),
    "it waits for ranks that have ended": Mutant(IN + "_new_members", "rank not in ended and ", "", False),
    "it waits for ranks that have left": Mutant(
        IN + "_new_members", " and registers[rank].stage != Stage.LEFT", "", False
    ),
    "it takes ranks that are behind": Mutant(IN + "_new_members", " and registers[r].slot == slot", "", False),
    "it takes ranks that have not come": Mutant(IN + "_new_members", ".stage >= Stage.HERE", ".stage >= Stage.AWAY"),
    "it leaves out ranks at once": Mutant(IN + "_new_members", "if len(here) == len(alive) or now >= until", "if here"),
    "members that still connect are left out": Mutant(
        IN + "_new_members", "max(self._deadline, self._since + LAGGING * self._limit)", "self._deadline"
    ),
    "it never leaves out anybody": Mutant(IN + "_new_members", " or now >= until", "", False),
    "it waits for the limit where a member left": Mutant(
        IN + "_are_connected", "register.stage == Stage.LEFT or ", "", False
    ),
    "it waits for the limit where a member failed": Mutant(
        IN + "_are_connected", " or _has_failed(register, slot)", "", False
    ),
    "it waits for the limit where a member ended": Mutant(
        IN + "_are_connected", "not ended.isdisjoint(members) or ", "", False
    ),
    "it waits for silent members without an end": Mutant(
        IN + "_are_connected", " or now >= self._since + self._limit", "", False
    ),
    "one connected member is enough": Mutant(IN + "_are_connected", "True if all(", "True if any("),
    "ready is taken for connected": Mutant(IN + "_are_connected", "Stage.CONNECTED", "Stage.READY"),
    "failed is taken for connected": Mutant(
        "_is_at", "stage <= register.stage < Stage.FAILED", "stage <= register.stage"
    ),
    "connected in an earlier decision counts": Mutant("_is_at", "register.slot == slot", "register.slot <= slot"),
    "failed in an earlier decision counts": Mutant("_has_failed", "register.slot == slot and ", "", False),
    "it connects without waiting for all": Mutant(IN + "_may_connect", " and all(ready)", "", False),
    "it connects with members that have ended": Mutant(
        IN + "_may_connect", "ended.isdisjoint(mine.members) and ", "", False
    ),
    "it does not hear what others decided": Mutant(IN + "heard", "ahead.slot > before.slot", "False"),
    "it learns the same decision again": Mutant(
        IN + "heard", "ahead.slot > before.slot", "ahead.slot >= before.slot", False
    ),
    "it does not write what it has decided": Mutant(
        IN + "heard", "[Read()] if self._mine == before else [Write(self._mine), Read()]", "[Read()]"
    ),
    "it comes back after it was left out": Mutant(
        IN + "_ended", "mine.slot and self._rank not in mine.members", "False"
    ),
    "it returns without being connected": Mutant(IN + "_ended", "mine.stage == Stage.CONNECTED", "True"),
    "it returns before all are connected": Mutant(IN + "_ended", "not mine.is_settled", "mine.slot < 1"),
    "it forgets its earlier attempt": Mutant(IN + "__init__", "before or Register()", "Register()"),
    "it has no end": Mutant(IN + "__init__", "now + timeout + 3 * limit", 'float("inf")', False),
    "connections of an earlier attempt count": Mutant(
        IN + "begin", "Stage.FAILED if self._mine.slot % 2 else Stage.HERE", "self._mine.stage or Stage.HERE"
    ),
    "it begins a new attempt as ready": Mutant(
        IN + "begin", "Stage.FAILED if self._mine.slot % 2", "Stage.READY if self._mine.slot % 2"
    ),
    "it is connected though that failed": Mutant(IN + "connected", "if is_connected else", "if True else"),
    "it does not tell that it leaves": Mutant(
        IN + "_leave", "self._mine._replace(stage=Stage.LEFT)", "self._mine", False
    ),
    "it has no patience with lower ranks": Mutant(IN + "_turn", "return sum(", "return 0 * sum(", False),
    "it waits for lower ranks that have ended": Mutant(IN + "_turn", " if rank not in ended", "", False),
    "it proposes again at once": Mutant(IN + "_compare", "now + self.stagger * (1 + self._rank)", "now", False),
}


IN = "Recovery."

RECOVERING = {
    "pages are used by ranks that have not met": Mutant(IN + "_found_registers", "self._has_met and ", ""),
    "pages are used by ranks of several hosts": Mutant(
        IN + "_found_registers", "are_on_one_host(monitor.peers, monitor.entry)", "True"
    ),
    "pages are never used": Mutant(IN + "_found_registers", "if self._has_met and", "if False and", False),
    "a store that is gone ends the recovery": Mutant(
        IN + "_reach", "if isinstance(error, EasydistError) or self._on_pages:", "if True:", False
    ),
    "the store is asked again though it is gone": Mutant(
        IN + "_reach", "self._has_met, self._timed = True, None", "pass", False
    ),
    "on the new registers nothing is written": Mutant(IN + "_reach", "self._registers.write(self._told)", "pass"),
    "it forgets its register between attempts": Mutant(IN + "_machine", "self._told.register", "None"),
    "the time limit is not passed on": Mutant(IN + "_machine", "timeout, LIMIT", "LIMIT, timeout", False),
    "actions before the last one are skipped": Mutant(
        IN + "_play", "for action in written:", "for action in written[:0]:"
    ),
    "it takes every attempt to connect for a success": Mutant(IN + "_play", "made is not None)", "True)"),
    "it does not leave after Ctrl-C": Mutant(IN + "_play", "self._write(machine.interrupted()[0])", "pass", False),
    "the hosts of ranks, not of members": Mutant(
        IN + "_play", "for rank in last.members", "for rank in range(len(last.members))"
    ),
    "the address of its store is not written": Mutant(IN + "_write", "address = self._address", "self._address", False),
    "the wrong member serves the store": Mutant(
        IN + "_write", "action.register.members[0]", "action.register.members[-1]", False
    ),
    "it does not keep what it has written": Mutant(
        IN + "_write", "told = self._told = RecoveryState", "told = RecoveryState"
    ),
    "time is taken after reading": Mutant(
        IN + "_look",
        "now, heard = time.monotonic(), self._reach(lambda registers: registers.read())",
        "heard, now = self._reach(lambda registers: registers.read()), time.monotonic()",
    ),
    "it waits for a store without an end": Mutant(IN + "_look", "if actions := machine.tick(now)", "if False", False),
    "it does not remember what it has heard": Mutant(IN + "_look", "self._heard = heard", "pass"),
    "it does not pause between two looks": Mutant(IN + "_look", "time.sleep(POLL)", "pass", False),
    "no process is known to have ended": Mutant(
        IN + "_ended", "if peer.is_gone() or peer.has_left()", "if peer.has_left()", False
    ),
    "all others are taken for ended": Mutant(IN + "_ended", "if peer.is_gone() or peer.has_left()", ""),
    "a lost rank of another host is waited for": Mutant(
        IN + "_ended", "return ended | {rank for rank in lost if", "return ended - {rank for rank in lost if", False
    ),
    "a rank of this host that was called lost is left out": Mutant(
        IN + "_lost_with_hosts", "for peer in peers.values() if not peer.is_visible", "for peer in peers.values()"
    ),
    "a lost rank that has come is left out": Mutant(IN + "_ended", " if heard[rank].register.stage == Stage.AWAY", ""),
    "the old store is used though it is gone": Mutant(
        IN + "_address", "not self._on_pages or (register.slot == 1 and self._answers())", "True", False
    ),
    "a new store for each attempt": Mutant(IN + "_address", "if self._served is None:", "if True:", False),
    "a silent store is taken for one that answers": Mutant(IN + "_answers", "not self._timed.is_silent", "True", False),
    "attempts meet in one place": Mutant(IN + "_connected", "recover/{action.attempt}", "recover"),
    "the rank in the old group": Mutant(
        IN + "_connected", "action.members.index(self.monitor.rank)", "self.monitor.rank"
    ),
    "an attempt that fails ends the recovery": Mutant(
        IN + "_connected", "except (RuntimeError, EasydistError):", "except ZeroDivisionError:", False
    ),
    "connecting has the whole limit": Mutant(
        IN + "_connected", "limit = CONNECTING * LIMIT", "limit = 9 * LIMIT", False
    ),
    "who connects does not look at the others": Mutant(IN + "_check", "if heard and", "if False and", False),
    "who looks for a store does not look at the others": Mutant(
        IN + "_meeting_place", "int(address), limit, check)", "int(address), limit, lambda: None)", False
    ),
    "each member meets in its own store": Mutant(
        IN + "_meeting_place", "recovered/{address}", "recovered/{self._place}", False
    ),
    "the leader meets in the old store": Mutant(
        IN + "_meeting_place", "return self._served", "return self._store", False
    ),
    "a group is recovered again": Mutant(IN + "run", "self._is_done = True", "pass"),
    "the old monitor goes on": Mutant(IN + "run", "self.monitor.retire()", "pass", False),
    "who is left out is told that it is late": Mutant("_error", "action.reason is Reason.LEFT_OUT", "False", False),
}

IN = "FirstMeeting."

FIRST_MEETING = {
    "it does not say who it is": Mutant(IN + "announce", "if self._store is not None:", "if False:", False),
    "it does not record that they have met": Mutant(IN + "conclude", 'self._store.set_first("met", _MET)', 'b"yes"'),
    "it replaces what is recorded": Mutant(
        IN + "conclude", 'self._store.set_first("met", _MET)', 'self._store.set("met", _MET) or b"yes"'
    ),
    "it does not hear that others recover": Mutant(IN + "conclude", "if answer == _NOT_MET.encode()", "if False"),
    "a silent store has recorded it": Mutant(IN + "conclude", "return answer is not None", "return True"),
    "a store that is silent is gone": Mutant(
        IN + "look", "except NoAnswerError as error", "except ZeroDivisionError as error"
    ),
    "it does not ask the store": Mutant(IN + "look", "if has_met:", "if True:"),
    "it records that they have met before they have": Mutant(IN + "_look", "_NOT_MET) or", "_MET) or"),
    "it does not wait for the answer": Mutant(
        IN + "_look", ' or _awaited(store, "met", deadline)', " or _MET.encode()"
    ),
    "it takes the answer for the opposite": Mutant(
        IN + "_look", "has_met = answer == _MET", "has_met = answer != _MET"
    ),
    "it does not wait for who they are": Mutant(
        IN + "_look",
        ".keys() and has_met:",
        ".keys() and False:",
    ),
    "it waits for an answer without an end": Mutant("_pause", "if time.monotonic() >= deadline", "if False", False),
}


REGISTERS = {
    "a register that was not read is empty": Mutant(
        "StoreRegisters.read", "not self._store.has_answered", "self._store.is_silent"
    ),
    "it goes on without an answer": Mutant("StoreRegisters.read", "rank != self._rank and not", "False and not"),
    "it does not know its own register": Mutant(
        "StoreRegisters.read", "self._mine if rank == self._rank else", "RecoveryState() if rank == self._rank else"
    ),
    "the page is not written beside the store": Mutant(
        "StoreRegisters.write", "self._page is not None and self._entry >= 0", "False"
    ),
    "one rank on this host is enough for pages": Mutant("are_on_one_host", "all(", "any("),
}
PAGE = {
    "the checksum is not checked": Mutant("_Page._version", " and check == zlib.crc32(text, number)", ""),
    "the number is not part of the checksum": Mutant("_Page._version", "zlib.crc32(text, number)", "zlib.crc32(text)"),
    "one look is enough": Mutant("_Page._versions", "while seen != (halves", "while seen is None and (halves"),
    "the older version counts": Mutant("_Page._versions", "max(halves)", "min(halves)"),
    "both versions are in one half": Mutant("OwnPage.set_register", "number % 2 * _VERSION_NBYTES", "0"),
    "all versions have one number": Mutant("OwnPage.set_register", "self._versions(entry)[0] + 1", "1"),
}

FOUND = {
    "ballots are not unique": 9,
    "ballots about other decisions count": (2, 1, 0.1),
    "not connected is taken for connected": 1,
    "a stage is kept from each decision to the next": 2,
    "an unfinished ballot is carried to the next decision": 1,
    "no stage is kept": 0,
    "the decision about connecting begins as HERE": 0,
    "it takes ranks that are behind": (2, 1, 0.1),
    "it takes ranks that have not come": 0,
    "it leaves out ranks at once": 0,
    "members that still connect are left out": 226,
    "it never leaves out anybody": 15,
    "it waits for the limit where a member failed": (2, 1, 0.0),
    "it waits for the limit where a member ended": (2, 1, 0.0),
    "it waits for silent members without an end": (2, 1, 0.1),
    "it comes back after it was left out": 3,
    "it is connected though that failed": 61,
    "pages are used by ranks that have not met": 487,
    "pages are used by ranks of several hosts": 0,
    "pages are never used": 13,
    "a store that is gone ends the recovery": 327,
    "the store is asked again though it is gone": 327,
    "it forgets its register between attempts": 41,
    "the time limit is not passed on": 65,
    "actions before the last one are skipped": 112,
    "it takes every attempt to connect for a success": 9,
    "it does not leave after Ctrl-C": 12,
    "the hosts of ranks, not of members": 112,
    "the address of its store is not written": 13,
    "the wrong member serves the store": 13,
    "it does not keep what it has written": 327,
    "it waits for a store without an end": 65,
    "it does not remember what it has heard": 112,
    "it does not pause between two looks": 1,
    "attempts meet in one place": 9,
    "the rank in the old group": 112,
    "an attempt that fails ends the recovery": 9,
    "who connects does not look at the others": 153,
    "each member meets in its own store": 12,
    "the leader meets in the old store": 13,
    "a group is recovered again": 327,
    "the old monitor goes on": 112,
    "it does not say who it is": 92,
    "it does not record that they have met": 112,
    "it replaces what is recorded": 112,
    "it does not hear that others recover": 82,
    "a silent store has recorded it": 112,
    "it records that they have met before they have": 6,
    "it does not wait for the answer": 487,
    "it does not know its own register": 112,
}
"""The schedule that notices a mutant, if no case does: its seed; or size, surprises and stagger of short ones."""
