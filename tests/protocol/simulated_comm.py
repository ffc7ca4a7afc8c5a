"""Communicators of simulated ranks: operations, counted (by torch's groups) or not, and waits for signals."""

from simulated_monitor import monitor_class
from simulated_process import record
from simulated_world import PYTHON, STEP, running

from easydist.errors import CollectiveTimeout, EasydistError, PeerLostError

LOOK = 0.1


class SimulatedComm:
    """One rank's part of a communicator, which is never connected again.

    Args:
        owner: The rank.
        index: The communicator's place among all.
        kind: "counted" for an ``easydist_shm`` group, "shm" or "gloo" for a ``TorchComm``.
        members: The ranks in it.
        link: Its connections.
    """

    def __init__(self, owner, index, kind, members, link):
        self.owner, self.index, self.kind, self.members, self.link = owner, index, kind, members, link
        self.world, self.process, self.group = owner.world, owner.process, owner.group
        self.rank, self.is_over, self.has_left = members.index(owner.rank), False, False
        self.has_given_up, self._signals, self._expected = False, {}, {}
        running.process = self.process
        self.monitor = monitor_class(owner.code.monitor.Monitor)(self, self.rank, len(members), f"comm {index}")
        self.monitor.waits_in_memory = link.is_memory
        owner.monitors.append(self.monitor)

    def __str__(self):
        return f"communicator {self.index} ({self.kind})"

    def meet(self, made):
        """Let it know the others.

        Args:
            made: The parts of all ranks, by rank.
        """
        running.process = self.process
        self.others = [other for other in made.values() if other is not self]
        peer = self.owner.code.monitor.Peer
        self.monitor.peers = {one.rank: peer(one.rank, record(one.process, one.monitor.entry)) for one in self.others}
        self.monitor.end()

    @property
    def has_parted(self):
        """True if it has given up, left, or ended."""
        return self.has_given_up or self.has_left or not self.process.is_alive

    # What the monitor asks for.

    def notice_signals(self):
        self.owner.notice_signals()

    def disconnect(self):
        self.link.close(self.rank)

    def gave_up(self, monitor, error, kind):
        self.has_given_up = True

    # Operations.

    def operate(self, sender, place, limit):
        """Make one operation.

        Args:
            sender: The member for whose signal the others wait; None for a collective.
            place: Where it stands in the program.
            limit: Seconds that it may take.
        """
        try:
            yield STEP, None
            if sender is not None:
                yield from self._signal(self.members.index(sender), limit)
            else:
                yield from self._collective(place, limit)
        except (Exception, KeyboardInterrupt) as error:
            self.is_over = True
            if isinstance(error, EasydistError):
                self.monitor.give_up(error)
            else:
                self.monitor.ended_by(error)
            if self.kind == "counted":
                self.monitor.end(is_done=False)
            raise

    def _collective(self, place, limit):
        monitor, counts = self.monitor, self.kind == "counted"
        if counts:
            monitor.begin("operation", "place", 1e9)
            yield from monitor.check_reports()
        message = ("operation", place, monitor.number)
        key = self.link.post(self.rank, (False, tuple(range(len(self.members)))), message)
        yield STEP, None
        if self.link.is_memory:
            yield from self._wait(key, limit)
        else:
            yield from self._wait_in_cpp(key, self.world.now + limit)
        self.group.laws.paired(self, self.link.messages(key))
        if counts:
            monitor.end()

    def _wait_in_cpp(self, key, deadline):
        """Wait as ``OwnGloo`` does, which only Ctrl-C, a broken connection or the time limit can end."""
        self.monitor.waits += 1
        try:
            broken = yield from self.owner.wait_for_link(self.link, key, self.rank, deadline)
        except RuntimeError as error:
            self.disconnect()
            raise CollectiveTimeout("operation timed out") from error
        finally:
            self.monitor.waits += 1
        if broken is not None:
            raise (yield from self.monitor.explain(RuntimeError("Connection closed by peer"), broken))

    def _wait(self, key, limit):
        began = self.world.now
        waiting = self.owner.wait_in(self.link, key, self.monitor)
        for pause in waiting:
            error = None
            try:
                yield pause
            except KeyboardInterrupt as caught:
                error = caught
            if error is not None:
                waiting.throw(error)
            if self.world.now >= began + limit and (missing := self.link.missing(key)):
                waiting.close()
                self.monitor.give_up(self.monitor.late(missing, limit))
                self.monitor.raise_if_broken()

    def _signal(self, sender, limit):
        """Put a signal to all others, or wait for it, as ``Regions.wait`` does."""
        if sender == self.rank:
            for other in self.others:
                other._signals[sender] = other._signals.get(sender, 0) + 1
            return
        self._expected[sender] = wanted = self._expected.get(sender, 0) + 1
        deadline, peer, is_gone, error = self.world.now + limit, self.monitor.peers[sender], False, None
        while self._signals.get(sender, 0) < wanted:
            if is_gone:
                lost = PeerLostError("gone")
                lost.rank = sender
                raise lost
            if self.world.now >= deadline:
                raise CollectiveTimeout("wait_signal")
            if error is not None:
                raise error
            yield PYTHON, min(deadline, self.world.now + LOOK)
            is_gone = peer.has_ended() or peer.has_left()
            error = self.monitor.reported([sender])

    def finalize(self):
        """Leave it, as a program does that no longer needs it."""
        if not self.is_over:
            self.is_over = self.has_left = True
            self.monitor.announce_leaving()
            self.link.close(self.rank)  # gloo's connections
