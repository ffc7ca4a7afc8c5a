"""The passes over a loader, counted where torch's iterators yield a batch.

A call that gathers rows has to know how many batches the loader has yielded, and whether a new pass has begun. torch's
iterators know the former, but nothing leads from a loader to them, and of one that is gone nobody can tell whether it
came to its end. So once this module is imported, each step of an iterator is noted here (0.5 µs).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.dataloader import _BaseDataLoaderIter

from easydist.metrics.tally import Tally

__all__ = ["Pass", "Passes", "passes_of"]


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

    def begin(self, start: int | None = 0, yielded: int = 0) -> Pass:
        """Begin a pass; it is current from now on.

        Args:
            start: The number of batches that were done before; None if that is unknown.
            yielded: The number of batches that it has yielded already.
        """
        self.begun += 1
        self.current = Pass(self, self.begun, start, yielded)
        return self.current


class Pass:
    """One pass over a loader.

    Attributes:
        serial: Its number, from 1.
        start: The number of batches that were done before, in the pass that it resumes; None if that is unknown.
        yielded: The number of batches that it has yielded.
        has_ended: True if it has no more batches.
    """

    def __init__(self, passes: Passes, serial: int, start: int | None, yielded: int) -> None:
        self.serial, self.start, self.yielded, self.has_ended = serial, start, yielded, False
        self._passes = passes

    def step(self) -> None:
        """Count a batch."""
        self.yielded += 1
        if self._passes.current is not self:
            self._passes.mixed += 1
            self._passes.current = self

    def end(self) -> None:
        """Note that there are no more batches."""
        if not self.has_ended:
            self.has_ended, self._passes.finished = True, self.serial


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
            current = passes_of(iterator).begin(before)
        except TypeError:  # a list of batches, which no known loader uses
            return
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


def _note_existing() -> None:
    """Note the iterators that began before: one at its first batches is in the loop from which this was imported."""
    for iterator in [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]:
        if iterator._num_yielded:
            start = None if hasattr(iterator, "_sampler_iter_yielded") else 0  # torchdata's may have been resumed
            vars(iterator)[_PASS] = (
                iterator._num_yielded,
                passes_of(iterator).begin(start, iterator._num_yielded),
            )


_note_existing()
_BaseDataLoaderIter.__next__ = _noting(_BaseDataLoaderIter.__next__)  # type: ignore[assignment,method-assign]
