"""The schedules that break simpler ways to agree on the survivors; docs/design/groups.md refers to them."""

import fcntl
import os

import pytest
from explored_agreements import explore
from random_recoveries import RECOVERING, loaded, play
from recovery_mutants import RECOVERING as MUTANTS
from simulated_agreement import Broken

from easydist.groups.membership import Ballot, Membership


class TheLowestDecides(Membership):
    """The lowest living rank writes the decision, and the others take it."""

    def _propose(self, now, registers, ended):
        super()._propose(now, registers, ended)
        if self._ballot is not Ballot.NONE:
            self._mine = self._mine._replace(value=self._wished)
            self._decided(now)


class OneRound(Membership):
    """A rank writes its proposal, reads all once, and takes the proposal of the highest ballot."""

    def _compare(self, now, registers):
        super()._compare(now, registers)
        if self._ballot is Ballot.ACCEPTED:
            self._decided(now)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TheLowestDecides, OneRound])
def test_with_loads_and_stores_alone_a_rank_that_is_stopped_decides_again(machine):
    """It is stopped before it writes its decision; another one dies; the others decide on fewer; it writes its own."""
    with pytest.raises(Broken, match="agreement: "):
        explore(3, 2, machine, kinds=("stop", "die"))


def test_an_arbiter_in_the_store_ends_with_rank_0():
    """Rank 0 serves the store and dies: the living ranks, which have met, cannot agree."""
    with pytest.raises(Broken, match="cannot agree with the survivors"):
        play(13, loaded({RECOVERING: MUTANTS["pages are never used"]}))


def test_a_name_in_the_file_system_is_left_behind_or_won_twice(tmp_path):
    """The winner creates a file that must not exist; it is killed at once, or removes the name so that none is left."""
    create = os.O_CREAT | os.O_EXCL
    os.close(os.open(tmp_path / "arbiter", create))
    assert os.listdir(tmp_path) == ["arbiter"]  # left behind if all ranks are killed here
    os.unlink(tmp_path / "arbiter")
    os.close(os.open(tmp_path / "arbiter", create))  # a rank that was stopped before this step wins, too


@pytest.fixture
def memory():
    descriptor = os.memfd_create("arbiter")
    yield f"/proc/self/fd/{descriptor}"
    os.close(descriptor)


def test_a_lock_is_lost_with_its_holder(memory):
    """The winner holds the lock; another rank sees that and returns; the winner dies, and a third rank wins, too."""
    winner, other = os.open(memory, os.O_RDWR), os.open(memory, os.O_RDWR)
    fcntl.flock(winner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BlockingIOError):  # also for as long as a holder is stopped that takes the lock for a mutex
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(winner)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_log_in_shared_memory_decides_only_for_those_that_opened_it_in_time():
    """The first entry that is appended counts, which is atomic. But the log is of one process.

    Rank 1 has opened the log of rank 0; rank 0 dies; rank 2 comes too late to open it. It has to take another log, in
    which its own entry is the first.
    """
    logs = [os.memfd_create(f"log of rank {rank}") for rank in (0, 1)]
    path = f"/proc/self/fd/{logs[0]}"
    rank_1 = os.open(path, os.O_RDWR | os.O_APPEND)
    os.write(rank_1, b"members 1\n")
    os.close(logs[0])  # rank 0 dies
    with pytest.raises(FileNotFoundError):
        os.open(path, os.O_RDWR | os.O_APPEND)
    rank_2 = os.open(f"/proc/self/fd/{logs[1]}", os.O_RDWR | os.O_APPEND)
    os.write(rank_2, b"members 1 and 2\n")
    assert os.pread(rank_1, 99, 0).splitlines()[0] != os.pread(rank_2, 99, 0).splitlines()[0]
    for descriptor in (rank_1, rank_2, logs[1]):
        os.close(descriptor)
