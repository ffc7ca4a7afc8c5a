"""The laws of a storm, checked in the reports of the ranks."""

from __future__ import annotations

from typing import Any

from launching import within
from storm_plan import Plan

Event = dict[str, Any]

BOUND = 3.0
"""Seconds from the last death until all survivors have recovered, on a quiet machine."""

KNOWN = {"RuntimeError", "PeerLostError", "RemoteError", "CommPeerLost", "CommRemoteError", "KeyboardInterrupt"}
KNOWN |= {"LeftOutError", "CommLeftOut"}  # of ranks that were interrupted while they recovered
LATE = {"CollectiveTimeout", "CommTimeout"}
"""The types of errors, in all storms and in those with a rank that is stopped."""

STORE = "thread easydist-call"
"""A thread that waits for a store, or for much data; it ends once the store's process goes on."""


class Log:
    """The events of a storm, by their kinds."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]

    def named(self, event: Event) -> set[int]:
        """Return the ranks in the world that an error may mean: in a split those of the old or the new communicator."""
        place, lists = event["named"], [event["members"], self.members(event["group"])]
        return set() if place is None else {ranks[place] for ranks in lists if ranks and place < len(ranks)}

    def members(self, group: int) -> list[int] | None:
        return next((event["members"] for event in self.of("met") if event["group"] == group), None)

    def ranks(self, *kinds: str) -> set[int]:
        return {event["rank"] for event in self.of(*kinds)}


def check(plan: Plan, events: list[Event], statuses: dict[int, int]) -> list[str]:
    """Return what was wrong."""
    log = Log(events)
    found = [f"rank {event['rank']}: {event['text']}" for event in log.of("wrong", "unexpected")]
    found += ["some ranks did not end"] * bool(log.of("hangs"))
    found += _ends(plan, log, statuses) + _members(log)
    for event in log.of("error", "left out"):
        found += [f"{fault}: {event}" for fault in _faults_of(plan, log, event)]
    found += _leftovers(log) + (_differences(log) if len(plan.faults) == 1 else [])
    late = [seconds for seconds in seconds_of_recoveries(plan, events) if seconds > within(BOUND)]
    return found + [f"recovered after {seconds:.1f} s" for seconds in late]


def _ends(plan: Plan, log: Log, statuses: dict[int, int]) -> list[str]:
    """Ranks that were neither killed nor left out come to the end."""
    killed = log.ranks("killed") - log.ranks("end")  # a signal to a rank that has ended does nothing
    expected = {rank: -9 if rank in killed else 0 for rank in range(plan.size)}
    found = [] if statuses == expected else [f"exit statuses {statuses}"]
    missing = {*range(plan.size)} - log.ranks("killed", "end", "left out", "wrong", "unexpected")
    return found + [f"ranks {sorted(missing)} have not come to the end"] * bool(missing)


def _members(log: Log) -> list[str]:
    """All ranks of a group agree on its members, and continue with the same step."""
    met: dict[int, dict[int, Any]] = {}
    for event in log.of("met"):
        met.setdefault(event["group"], {})[event["rank"]] = event["members"], event["next"]
    found = [f"group {group}: {rows}" for group, rows in met.items() if len({repr(row) for row in rows.values()}) > 1]
    for group, rows in met.items():
        members = next(iter(rows.values()))[0]
        found += [f"group {group}: rank {rank} is no member of {members}" for rank in rows if rank not in members]
    return found


def _differences(log: Log) -> list[str]:
    """After one fault, all ranks that wait in one verb raise the same, unless they hear first of one that recovers.

    Ranks whose time ends at once each say themselves who is missing.
    """
    told: dict[tuple[int, int], set[str]] = {}
    for event in log.of("error"):
        is_own = event["type"] == "KeyboardInterrupt" or "to recover it" in event["text"]
        if event["kind"] == "verb" and not is_own:
            what = f"{event['type']} about rank {event['named']}"
            told.setdefault((event["group"], event["step"]), set()).add(what)
    return [f"ranks raise {errors}" for errors in told.values() if len(errors) > 1]


def _leftovers(log: Log) -> list[str]:
    found = []
    for event in log.of("end"):
        before = Log([other for other in log.events if other["at"] <= event["at"]])
        earlier = Log([other for other in before.events if other["at"] < event["at"] - 1])  # it looks before it tells
        waits = {STORE} if before.ranks("stopped") - earlier.ranks("continued", "killed") else set()
        if left := {what: count for what, count in event["left"].items() if what not in waits}:
            found.append(f"rank {event['rank']} keeps {left}")
    return found


def _faults_of(plan: Plan, log: Log, event: Event) -> list[str]:
    """Return what is wrong with one error: its type, and the ranks that it names."""
    kind, at = event["type"], event["at"]
    found = [] if kind in (KNOWN | LATE if plan.has_stop else KNOWN) else ["unexpected type"]
    before = Log([other for other in log.events if other["at"] <= at])
    gone = before.ranks("killed", "end", "left out")
    acting = before.ranks("interrupted", "error")
    is_lost = "PeerLost" in kind and "has left" not in event["text"]
    if (named := log.named(event)) and not named & (gone if is_lost else gone | acting):
        found.append("names a rank that is there")
    if "PeerLost" in kind and event["status"] not in (None, 0, -9):
        found.append("wrong exit status")
    if "LeftOut" in kind and event["rank"] not in before.ranks("stopped", "interrupted"):
        found.append("left out, but never stopped")
    return found


def seconds_of_recoveries(plan: Plan, events: list[Event]) -> list[float]:
    """Return the seconds from the last death before each recovery until all of its members had recovered.

    Recoveries after a rank was stopped are left out: the others wait for it.
    """
    log, found = Log(events), []
    for group in sorted({event["group"] for event in log.of("recovered")}):
        ends = [event["at"] for event in log.of("recovered") if event["group"] == group]
        begin = max((event["at"] for event in log.of("recovered") if event["group"] == group - 1), default=0.0)
        deaths = [event["at"] for event in log.of("killed") if begin <= event["at"] <= min(ends)]
        if deaths and not [event for event in log.of("stopped") if event["at"] <= max(ends)]:
            found.append(max(ends) - max(deaths))
    return found
