"""The passes over a loader, counted where torch's iterators yield a batch.

A call that gathers rows has to know how many batches the loader has yielded, and whether a new pass has begun. torch's
iterators know the former, but nothing leads from a loader to them, and of one that is gone nobody can tell whether it
came to its end. So once this module is imported, each step of an iterator is noted here (0.5 µs).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch.utils.data.dataloader import _BaseDataLoaderIter

from easydist.metrics.order import Sharding
from easydist.metrics.tally import Lot, Position, Tally

__all__ = ["LoaderSteps", "Pass", "Passes", "existing", "passes_of"]


class Passes:
    """All passes over one loader.

    Attributes:
        begun: The number of passes that have begun.
        finished: The serial number of the pass that came to its end last; 0 if there is none.
        mixed: How often an older pass went on after a newer one had begun.
        current: The pass that yielded last.
        tally: The rows that were gathered.
    """

    def __init__(self) -> None:
        self.begun = self.finished = self.mixed = 0
        self.current: Pass | None = None
        self.tally = Tally()

    def begin(self, iterator: Any, start: int | None = 0, yielded: int = 0) -> Pass:
        """Begin a pass; it is current from now on.

        Args:
            iterator: Its iterator.
            start: The number of batches that were done before; None if that is unknown.
            yielded: The number of batches that it has yielded already.
        """
        self.begun += 1
        self.current = Pass(self, iterator, self.begun, start, yielded)
        return self.current

    def are_left(self) -> bool:
        """True if a loop over the loader was left before its end, and another loader has taken a step since."""
        latest = Pass.latest
        is_latest = latest is None or latest.passes is self
        return self.current is not None and self.current.iterator() is None and not is_latest


class Pass:
    """One pass over a loader.

    Attributes:
        latest: The pass over any loader that took a step last; its last step finds no more batches.
        passes: All passes over its loader.
        iterator: A weak reference to its iterator.
        serial: Its number, from 1.
        start: The number of batches that were done before, in the pass that it resumes; None if that is unknown.
        yielded: The number of batches that it has yielded.
        has_ended: True if it has no more batches.
    """

    latest: ClassVar[Pass | None] = None

    def __init__(self, passes: Passes, iterator: Any, serial: int, start: int | None, yielded: int) -> None:
        self.serial, self.start, self.yielded, self.has_ended = serial, start, yielded, False
        self.passes, self.iterator = passes, ref(iterator)

    def step(self) -> None:
        """Count a batch."""
        self.yielded += 1
        if self.passes.current is not self:
            self.passes.mixed += 1
            self.passes.current = self

    def end(self) -> None:
        """Note that there are no more batches."""
        if not self.has_ended:
            self.has_ended, self.passes.finished = True, self.serial


class LoaderSteps(NamedTuple):
    """The batches that a loader yields to each rank.

    Attributes:
        passes: The passes over it.
        size: The rows of a full batch on all ranks.
        skipped: The batches of each pass that it reads and does not yield.
        ahead: The batches that it reads before it yields the one before.
        reads: The batches that it reads for one that it yields.
        drops: True if it drops the last of them if they are fewer.
        has_ended: True if the loader says itself that it has yielded its last batch.
    """

    passes: Passes
    size: int
    skipped: int = 0
    ahead: int = 0
    reads: int = 1
    drops: bool = False
    has_ended: bool = False

    @property
    def done(self) -> int | None:
        """The rows of all ranks before the current pass, which may resume another; None if that is unknown."""
        current = self.passes.current
        return 0 if current is None else None if current.start is None else current.start // self.reads * self.size

    def lot(self, sharding: Sharding) -> Lot:
        """Return the loader as this rank knows it, given the distribution of its samples."""
        return Lot(self.passes.tally, sharding, self.at(sharding.rows))

    def at(self, rows: int | None) -> Position:
        """Return the position.

        Args:
            rows: The rows of the pass on all ranks; None if that is unknown.
        """
        if (current := self.passes.current) is None:
            return Position(has_ended=self.has_ended)
        has_ended = self.has_ended or (current.has_ended and self.reads == 1)
        has_ended = has_ended or (rows is not None and not self.ahead and current.yielded * self.size >= rows)
        is_partial = has_ended and not self.drops
        read = -(-current.yielded // self.reads) if is_partial else current.yielded // self.reads
        steps = max(read - self.skipped - (0 if current.has_ended or has_ended else self.ahead), 0)
        available = steps * self.size if rows is None else rows if has_ended else min(steps * self.size, rows)
        # A pass that reads several batches for a step has read its last before it yields what it has of them.
        finished = self.passes.finished if self.reads == 1 else 0
        return Position(current.serial, steps, available, has_ended, finished, self.passes.mixed)


_passes: WeakKeyDictionary[Any, Passes] = WeakKeyDictionary()
"""The passes by their loader's index sampler: an iterator refers to that, but not to its loader."""

_PASS = "_easydist_pass"
"""The attribute of an iterator for its number of batches when it was noted last, and its pass."""


def passes_of(loader: Any) -> Passes:
    """Return the passes over a loader of torch's, or over one that wraps it as accelerate's do."""
    passes = _passes.get(loader._index_sampler)
    return _passes.setdefault(loader._index_sampler, Passes()) if passes is None else passes


def _note(iterator: Any, before: int, has_ended: bool) -> None:
    """Note a step of an iterator."""
    at, current = vars(iterator).get(_PASS, (None, None))
    if at != before:  # the first step, or the first since its workers began again
        try:
            current = passes_of(iterator).begin(iterator, before)
        except TypeError:  # a list of batches, which no known loader uses
            return
    Pass.latest = current
    current.end() if has_ended else current.step()
    vars(iterator)[_PASS] = iterator._num_yielded, current


def _noting(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def noted(iterator: Any) -> Any:
        before = iterator._num_yielded
        try:
            batch = step(iterator)
        except StopIteration:
            _note(iterator, before, has_ended=True)
            raise
        _note(iterator, before, has_ended=False)
        return batch

    return noted


def existing(*bases: type) -> list[Any]:
    """Return all existing instances. Uses ``type``, since accelerate's loaders report another ``__class__``.

    Asks for what refers to the classes: a list of all objects (``gc.get_objects``) would hold the tuples that other
    threads are building, and those threads would raise a ``SystemError``.
    """
    classes = [*bases]
    for each in classes:
        classes += type.__subclasses__(each)
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def _note_existing() -> None:
    """Note the iterators that began before: one at its first batches is in the loop from which this was imported."""
    for iterator in existing(_BaseDataLoaderIter):
        if iterator._num_yielded:
            start = None if hasattr(iterator, "_sampler_iter_yielded") else 0  # torchdata's may have been resumed
            vars(iterator)[_PASS] = (
                iterator._num_yielded,
                passes_of(iterator).begin(iterator, start, iterator._num_yielded),
            )


_note_existing()
_BaseDataLoaderIter.__next__ = _noting(_BaseDataLoaderIter.__next__)  # type: ignore[assignment,method-assign]
