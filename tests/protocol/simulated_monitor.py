"""The real monitor of a group on a simulated rank: what the watchdog's thread does, and what the laws want to know."""

import functools

from simulated_world import NEVER

WATCHDOG_EVERY, GRACE_OF_SIGNAL = 0.25, 0.05


@functools.lru_cache(maxsize=4)
def monitor_class(real):
    """Return the class of the simulated monitors.

    Args:
        real: The loaded ``Monitor``.
    """

    class SimulatedMonitor(real):
        """A monitor of production, which ``sources.load`` has loaded.

        Args:
            owner: The simulated rank in its group, which hears of what the monitor does.
            rank: The rank in the group.
            size: The size of the group.
            name: The name of the group.
        """

        def __init__(self, owner, rank, size, name):
            process = owner.process
            super().__init__(rank, size, NEVER, process.client.under(f"{name}/"), name)
            self.world, self.process, self._owner, self._looked = process.world, process, owner, -1
            self.sync_signals, self.disconnect = owner.notice_signals, owner.disconnect

        def _heard(self, awaited, is_exact):
            """Look only if there is something new, which saves most of the time of a simulation."""
            news = self.world.news
            if self._looked == news and not (self._looks or self._seen_left):
                return ()
            self._looked = news
            return super()._heard(awaited, is_exact)

        def begin(self, *arguments, **options):
            self._looked = -1
            super().begin(*arguments, **options)

        def give_up(self, error, kind="", wait=None):
            was_broken = self.broken
            super().give_up(error, kind, wait)
            if self.broken is not was_broken:
                self._owner.gave_up(self, error, kind)

        # The watchdog.

        def begin_wait(self):
            super().begin_wait()
            self.world.after(self.world.random.random() * WATCHDOG_EVERY, self._watch, self.waits)

        def _watch(self, wait):
            self.process.later(self._check_now, wait)

        def _check_now(self, wait):
            if self.waits != wait or self.broken is not None:
                return
            self.publish()
            paid = self.process.client.paid()  # the thread's own questions
            error = self._in_vain(list(self.peers))
            cost = max(0.0, self.process.client.paid() - self.world.now)
            if error is not None:
                slow = 40 if self.world.random.random() < 0.1 else 0.25
                self.world.after(cost + self.world.soon() * slow, self.process.later, self._found_in, error, wait)
            self.world.after(max(cost, paid - self.world.now) + WATCHDOG_EVERY, self._watch, wait)

        def _found_in(self, error, wait):
            self.give_up(error, wait=wait)

        def heard_signal(self):
            """Do what the watchdog does after Ctrl-C: end the wait in C++, unless it ends by itself in a moment."""
            if self.waits % 2:
                self.world.after(GRACE_OF_SIGNAL, self.process.later, self._interrupt_wait, self.waits)

        def _interrupt_wait(self, wait):
            self.interrupted(KeyboardInterrupt(), wait)

    return SimulatedMonitor
