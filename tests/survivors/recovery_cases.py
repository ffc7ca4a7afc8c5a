"""Situations of one process that recovers, which no schedule leads to, or too rarely.

Each case takes the modules (``random_recoveries.loaded``), so that mutants can be tried.
"""

from types import SimpleNamespace

import pytest
import simulated_recovery
from torch.distributed import HashStore

from easydist.errors import LeftOutError, PeerLostError
from easydist.groups.membership import CONNECTING, Connect, Raise, Reason, Register, Stage
from easydist.groups.registers import RecoveryState
from easydist.liveness.log import Log
from easydist.liveness.timed_store import TimedStore


def peer(is_gone=False, has_left=False, is_visible=True):
    gone, left = (lambda: is_gone), (lambda: has_left)
    return SimpleNamespace(rank=1, is_gone=gone, has_left=left, is_visible=is_visible, host_id="b")


def recovery(modules, one=None, lost=None, **fields):
    """Return the recovery of rank 0 of two, whose peer is this one, and which has heard that a rank is lost."""
    error = None if lost is None else PeerLostError("gather: a rank is lost")
    if error is not None:
        error.rank = lost
    made = object.__new__(modules[0].Recovery)
    made.monitor = SimpleNamespace(rank=0, name="g", peers={1: one or peer()}, broken=error, silent=list)
    made.monitor.questions = SimpleNamespace(have_begun=False)
    made.__dict__.update(fields)
    return made


def who_has_ended_or_left_is_not_waited_for(modules):
    there = [RecoveryState(Register(Stage.HERE))] * 2
    assert recovery(modules, peer())._ended(there) == set()
    assert recovery(modules, peer(is_gone=True))._ended(there) == {1}
    assert recovery(modules, peer(has_left=True))._ended(there) == {1}


def a_lost_rank_of_another_host_is_not_waited_for(modules):
    away, there = [RecoveryState()] * 2, [RecoveryState(Register(Stage.HERE))] * 2
    remote = peer(is_visible=False)
    assert recovery(modules, remote, lost=1)._ended(away) == {1}
    assert recovery(modules, remote, lost=1)._ended(there) == set()  # it has come after all
    assert recovery(modules, remote, lost=0)._ended(away) == set()
    assert recovery(modules, peer(), lost=1)._ended(away) == set()  # it lives, and may come


def ranks_of_a_host_that_does_not_answer_are_not_waited_for(modules):
    """Neither those of the lost rank's host, nor those of a host that answers questions no more."""
    away, there = [RecoveryState()] * 3, [RecoveryState(Register(Stage.HERE))] * 3
    one = recovery(modules, peer(is_visible=False), lost=1)
    one.monitor.peers[2] = other = peer(is_visible=False)
    other.rank = 2
    for is_unreachable, host, ended in ((True, "b", {1, 2}), (True, "c", {1}), (False, "b", {1})):
        one.monitor.broken.is_unreachable, other.host_id = is_unreachable, host
        assert one._ended(away) == ended
        assert one._ended(there) == set()
    one.monitor.broken, one.monitor.silent = None, lambda: [2]
    assert (one._ended(away), one._ended(there)) == ({2}, set())


def the_lowest_rank_of_a_host_asks_the_others(modules):
    away, there = [RecoveryState()] * 2, [RecoveryState(Register(Stage.HERE))] * 2
    for is_visible, have_begun, heard, asks in (
        (True, False, there, []),
        (True, True, there, [1]),  # a lower rank has come since, and has had no answer yet
        (True, False, away, [1]),
        (False, False, there, [1]),
    ):
        asked = []
        one = recovery(modules, peer(is_visible=is_visible))
        one.monitor.questions.have_begun = have_begun
        one.monitor.rank, one.monitor.peers = 1, {0: one.monitor.peers[1]}
        one.monitor.silent = lambda asked=asked: asked.append(1) or []
        one._ended(heard)
        assert asked == asks


def a_process_serves_one_store(modules):
    simulated_recovery.begin(None)
    simulated_recovery.WORLD.step = lambda: None
    one = recovery(modules, _served=None, _on_pages=True, _timed=None)
    assert one._address(Register(slot=3)) == one._address(Register(slot=5)) == "1"


def a_silent_store_does_not_answer(modules):
    for is_silent in (False, True):
        timed = SimpleNamespace(check=lambda keys: False, is_silent=is_silent)
        assert recovery(modules, _timed=timed)._answers() is not is_silent


def who_is_left_out_is_told_so(modules):
    error = modules[0]._error(Raise(Reason.LEFT_OUT, (1,)), recovery(modules).monitor)
    assert isinstance(error, LeftOutError)
    assert error.members == (1,)


def a_silent_store_decides_when_it_answers_again(modules):
    """Then others may have agreed in it; so knowing all others is not enough."""
    monitor = SimpleNamespace(rank=0, name="g", entry=0, peers={1: SimpleNamespace(pid=7)}, log=Log)
    first = modules[1].FirstMeeting(None, monitor)
    first._store = SimpleNamespace(append=lambda *_: None, set_first=lambda *_: None, get=lambda *_: None)
    simulated_recovery.begin(None)
    simulated_recovery.WORLD.step = later
    with pytest.raises(PeerLostError, match="does not answer"):
        first.look(False, 1.0)


def all_have_to_be_known_where_the_ranks_have_met(modules):
    """Else this rank would agree in the store, and those that know all others on their pages."""
    monitor = SimpleNamespace(rank=0, name="g", entry=0, peers={1: SimpleNamespace(pid=None)}, log=Log)
    first = modules[1].FirstMeeting(None, monitor)
    first._store = TimedStore(HashStore())
    first._store.set_first("met", "yes")
    world = simulated_recovery.begin(None)
    world.processes = [SimpleNamespace(host="a"), SimpleNamespace(host="a", is_dead=False)]
    world.current = world.processes[0]
    world.step = lambda seconds: (first._store.append("who", 1, "told"), later(seconds))
    assert first.look(False, 1.0)
    assert monitor.peers[1].pid is not None


def an_unanswered_read_is_no_register(modules):
    """The store may answer again just after that, and is not silent any more."""
    store = SimpleNamespace(get=lambda *_: None, has_answered=False, is_silent=False)
    assert modules[0].StoreRegisters(store, 0, 2, None, -1).read() is None


def the_page_is_written_before_the_store(modules):
    """So whoever finds the store gone finds on the pages all that was decided in the store."""
    written = []
    store = SimpleNamespace(set=lambda *_: written.append("store"))
    page = SimpleNamespace(set_register=lambda *_: written.append("page"))
    modules[0].StoreRegisters(store, 0, 2, page, 0).write(RecoveryState())
    assert written == ["page", "store"]


def a_group_too_large_for_pages_has_the_store(modules):
    def refuse(*_):
        raise ValueError("the group has too many ranks")

    written = []
    store = SimpleNamespace(set=lambda *told: written.append(told))
    modules[0].StoreRegisters(store, 0, 2, SimpleNamespace(set_register=refuse), 0).write(RecoveryState())
    assert written == [("recover/0", RecoveryState().to_json())]


def pages_need_all_ranks_on_this_host(modules):
    peers = {1: SimpleNamespace(shares_pages=True), 2: SimpleNamespace(shares_pages=False)}
    assert not modules[0].are_on_one_host(peers, 0)


def time_is_taken_before_reading(modules):
    """A process that is stopped in the middle must not leave out those that came meanwhile."""
    world = simulated_recovery.begin(None)
    world.step = later
    one = recovery(modules, _registers=SimpleNamespace(read=lambda: later(5.0) or [RecoveryState(), RecoveryState()]))
    machine = SimpleNamespace(heard=lambda now, registers, ended: now)
    assert one._look(machine) < 1.0


def who_continues_on_the_pages_writes_there_first(modules):
    """Its page may lack what it has written in a store that went without an answer."""
    pages, told = [], RecoveryState(Register(Stage.HERE))
    new = SimpleNamespace(write=pages.append)
    one = recovery(modules, _registers=None, _on_pages=False, _told=told, _found_registers=lambda: new)

    def read(registers):
        if registers is None:
            raise RuntimeError("the store is gone")
        return [*pages]

    assert one._reach(read) == [told]


def an_attempt_has_a_part_of_the_limit(modules):
    """So that members that have failed and come again are not left out by those that still try to connect."""
    simulated_recovery.begin(None)
    one = recovery(modules, _told=RecoveryState(), _store=simulated_recovery.Store(None))
    attempt = one._connected(None, Connect(1, (0,)), lambda attempt: attempt)
    assert attempt.deadline == CONNECTING * simulated_recovery.LIMIT


def the_store_of_a_member_that_has_ended_is_given_up(modules):
    """At once: the first member has ended after it had named the store that it served."""
    world = simulated_recovery.begin(SimpleNamespace(needs_store=False))
    simulated_recovery.Store(None).is_gone, world.step = True, lambda seconds=0.0: later(seconds)
    world.current, heard = SimpleNamespace(rank=0), [RecoveryState(), RecoveryState(address="1")]
    one = recovery(modules, peer(is_gone=True), _heard=heard, _registers=SimpleNamespace(read=lambda: heard))
    machine = SimpleNamespace(is_in_vain=lambda now, registers, ended: ended == {1})
    assert one._connected(machine, Connect(1, (1, 0)), lambda attempt: attempt) is None
    assert world.now < CONNECTING * simulated_recovery.LIMIT


def later(seconds):
    simulated_recovery.WORLD.now += seconds
    assert simulated_recovery.WORLD.now < 9.0, "it waits without an end"


CASES = [
    who_has_ended_or_left_is_not_waited_for,
    a_lost_rank_of_another_host_is_not_waited_for,
    ranks_of_a_host_that_does_not_answer_are_not_waited_for,
    the_lowest_rank_of_a_host_asks_the_others,
    a_process_serves_one_store,
    a_silent_store_does_not_answer,
    who_is_left_out_is_told_so,
    a_silent_store_decides_when_it_answers_again,
    all_have_to_be_known_where_the_ranks_have_met,
    an_unanswered_read_is_no_register,
    the_page_is_written_before_the_store,
    a_group_too_large_for_pages_has_the_store,
    pages_need_all_ranks_on_this_host,
    time_is_taken_before_reading,
    who_continues_on_the_pages_writes_there_first,
    an_attempt_has_a_part_of_the_limit,
    the_store_of_a_member_that_has_ended_is_given_up,
]
