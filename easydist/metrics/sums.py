"""Exact sums, means and counts over all ranks, all of them in one exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from operator import index
from typing import Any, cast

import numpy as np
import torch

from easydist import tree
from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.data.backing import backed
from easydist.groups.communicators import Communicators
from easydist.metrics.columns import are_plain
from easydist.metrics.exact import ExactSum, floats, numbers
from easydist.metrics.states import GatherStates, States
from easydist.state import communicators
from easydist.typing import Group, Timeout

__all__ = ["Counts", "Metric", "Sums", "WeightedMean", "compute"]


class Metric(ABC):
    """A value over all samples of all ranks, to which every rank adds its own."""

    def compute(self, *, group: Group = None, timeout: Timeout | None = None) -> Any:
        """Combine all ranks' values. ``metrics.compute`` does so for many metrics in one exchange."""
        return compute(self, group=group, timeout=timeout)

    @abstractmethod
    def reset(self) -> None:
        """Remove all values on this rank."""

    @abstractmethod
    def state(self) -> Any:
        """Return this rank's values, as containers and numbers."""

    @abstractmethod
    def merged(self, states: list[Any]) -> Any:
        """Return the combined value of the states of all ranks, in rank order.

        Args:
            states: What ``state`` returned on each rank.
        """


class Sums(Metric):
    """Sums by name.

    Law: ``compute()[name]`` is ``math.fsum`` of all numbers that any rank has added under the name, or their exact sum
    if all of them are integers. The result depends neither on their order nor on their distribution over ranks.

    Example:
        >>> sums = Sums()
        >>> sums.update(tokens=512, loss=0.1)
        >>> sums.update(tokens=torch.tensor([100, 28]), loss=0.2)
        >>> sums.compute()
        {'tokens': 640, 'loss': 0.30000000000000004}

    Cost: as ``compute``. ``update`` needs no exchange. It reads its values, so it waits for those on an accelerator.

    Source: ``math.fsum``; torchmetrics' ``SumMetric`` for the verbs.
    """

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}

    def update(self, **values: Any) -> None:
        """Add to the sums, on this rank.

        Args:
            **values: A number, or a tensor or array whose elements are all added, by name. Bools count as 0 and 1. On
                ranks that do not have a name, its sum is empty.

        Raises:
            TypeError: A value is none of these, or complex, or a masked array. Then nothing was added.
        """
        added = {name: numbers(value, name) for name, value in values.items()}
        for name, some in added.items():
            self._sums.setdefault(name, ExactSum()).add(some)

    def reset(self) -> None:
        """Remove all names on this rank."""
        self._sums.clear()

    def state(self) -> dict[str, Any]:
        """Return the names and their exact sums."""
        return {name: total.state() for name, total in self._sums.items()}

    def merged(self, states: list[dict[str, Any]]) -> dict[str, int | float]:
        """Return the sums of all names, in the order in which the ranks first had them."""
        names = dict.fromkeys(name for state in states for name in state)
        return {name: ExactSum.of([state[name] for state in states if name in state]).value() for name in names}


class WeightedMean(Metric):
    """A mean with explicit weights.

    Law: ``compute()`` is the sum of ``value * weight`` divided by the sum of ``weight``, over everything that any rank
    has added: each product is a float64, both sums are exact, and their quotient is rounded once. The result depends
    neither on the order nor on the distribution over ranks. A value of weight 0 does not count, whatever it is: the
    mean of a batch without rows is NaN. Without any weight the mean is NaN.

    Example:
        >>> loss = WeightedMean()
        >>> loss.update(0.5, weight=8)  # the mean of a batch of 8
        >>> loss.update(2.0, weight=1)  # the last batch
        >>> loss.compute()
        0.6666666666666666

    Cost: as ``compute``. ``update`` needs no exchange. It reads its values, so it waits for those on an accelerator.

    Source: torchmetrics' ``MeanMetric`` for the verbs.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, value: Any, weight: Any) -> None:
        """Add to the mean, on this rank.

        Args:
            value: A number, or a tensor or array of several.
            weight: The weight of each value, such as the number of samples in the batch whose mean it is: one number
                for all, or as many as there are values. Not negative.

        Raises:
            TypeError: One of them is neither a number nor a tensor or array of numbers, or is a masked array.
            ValueError: There are more or fewer weights than values; a weight is negative or not finite; or an integer
                is too large for a float64.
        """
        values, weights = numbers(value, "value"), numbers(weight, "weight")
        factors, products = floats(weights, "WeightedMean: weight"), floats(values, "WeightedMean: value")
        if len(weights) not in (1, len(values)):
            raise ValueError(
                f"WeightedMean: {len(values)} values, but {len(weights)} weights; pass one, or one for each"
            )
        if not (np.isfinite(factors) & (weights >= 0)).all():
            raise ValueError("WeightedMean: a weight is negative or not finite")
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite show in the mean
            self._weighted.add(np.where(factors, products * factors, 0.0))
        self._weights.add(np.broadcast_to(weights, values.shape))

    def reset(self) -> None:
        """Remove all values on this rank."""
        self._weighted, self._weights = ExactSum(), ExactSum()

    def state(self) -> tuple[Any, Any]:
        """Return the exact sums."""
        return self._weighted.state(), self._weights.state()

    def merged(self, states: list[tuple[Any, Any]]) -> float:
        """Return the quotient of the sums of all ranks."""
        weighted, weights = (ExactSum.of(list(column)) for column in zip(*states, strict=True))
        return weighted.over(weights)


class Counts(Metric):
    """The number of occurrences of each key.

    Law: ``compute()`` is the ``Counter`` of all keys that any rank has added. On ranks that do not have a key, it
    counts as 0.

    Example:
        >>> counts = Counts()
        >>> counts.update(["cat", "dog", "cat"])
        >>> counts.update({"dog": 2})
        >>> counts.compute()
        Counter({'dog': 3, 'cat': 2})

    Cost: as ``compute``.

    Source: ``collections.Counter``.
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def update(self, keys: Iterable[Hashable] | Mapping[Any, int] | torch.Tensor) -> None:
        """Count keys, on this rank.

        Args:
            keys: Text, numbers, tuples and other plain values: an iterable of them, a mapping from them to their
                numbers of occurrences, or a tensor or array of them. Tensors without dimensions and NumPy's scalars
                count as the Python value that they equal, also in tuples.

        Raises:
            TypeError: ``keys`` is a string, whose characters would be counted, or a masked array; a key cannot be
                hashed, or is a tensor of several values; or a count is not an integer. Then nothing was added.
        """
        if isinstance(keys, str | bytes):
            raise TypeError(f"Counts: {keys[:60]!r} is one key; pass it in a list")
        if isinstance(keys, np.ma.MaskedArray):
            raise TypeError("Counts: keys is a masked array; pass .compressed(), which has no masked values")
        if isinstance(keys, torch.Tensor):
            keys = backed(keys, "the tensor of keys")
        if isinstance(keys, torch.Tensor | np.ndarray):
            keys = keys.flatten()
            keys = keys.tolist() if isinstance(keys, torch.Tensor) or keys.dtype.kind in _TEXT_OR_NUMBERS else [*keys]
        added = _counted(keys)
        if isinstance(keys, Mapping) or not are_plain(added):
            pairs = [(_plain(key), _whole(count)) for key, count in added.items()]
            added = Counter()
            for key, count in pairs:
                added[key] += count
        self._counts.update(added)

    def reset(self) -> None:
        """Remove all keys on this rank."""
        self._counts.clear()

    def state(self) -> dict[Hashable, int]:
        """Return this rank's counts."""
        return dict(self._counts)

    def merged(self, states: list[dict[Hashable, int]]) -> Counter[Hashable]:
        """Return the counts of all ranks."""
        total: Counter[Hashable] = Counter()
        for state in states:
            total.update(state)
        return total


_TEXT_OR_NUMBERS = "biufcUS"
"""NumPy's kinds whose arrays hold Python's text and numbers."""


def _counted(keys: Any) -> Mapping[Any, Any]:
    """Count equal keys. Of a mapping, they are the counts already."""
    if isinstance(keys, Mapping):
        return keys
    try:
        return Counter(keys)
    except TypeError as error:
        raise TypeError(f"Counts: {error}; pass text, numbers or tuples of them, in a list") from None


def _plain(key: Any) -> Hashable:
    """Return the Python value that a key equals."""
    if isinstance(key, torch.Tensor | np.ndarray) and key.ndim:
        raise TypeError(f"Counts: a key is of shape {tuple(key.shape)}; pass its .tolist(), or one value")
    if isinstance(key, torch.Tensor | np.generic):
        value = key.item()
        is_date = isinstance(key, np.datetime64 | np.timedelta64)
        if isinstance(value, np.generic) or (is_date and isinstance(value, int | None)):  # nanoseconds, and NaT
            raise TypeError(f"Counts: Python has no value that equals the key {key!r}; convert it")
        return cast(Hashable, value)
    return tuple(map(_plain, key)) if type(key) is tuple else cast(Hashable, key)


def _whole(count: Any) -> int:
    try:
        return index(count)
    except TypeError:
        raise TypeError(f"Counts: counts are ints, got {count!r}") from None


@eager
def compute(metrics: Any, *, group: Group = None, timeout: Timeout | None = None) -> Any:
    """Combine the values of all ranks, for many metrics at once.

    Law: every metric's value is exactly that of a single process which has added everything that the ranks have added.

    Example:
        >>> loss, right = WeightedMean(), Sums()
        >>> loss.update(0.25, weight=4)
        >>> right.update(top1=3, top5=4)
        >>> compute({"loss": loss, "right": right})
        {'loss': 0.25, 'right': {'top1': 3, 'top5': 4}}

    Args:
        metrics: ``Sums``, ``WeightedMean`` and ``Counts`` in any dicts, lists and tuples, or a single one.
        group: The participating ranks.
        timeout: The time limit of the call; None is the group's.

    Returns:
        The same structure with the values in place of the metrics, on every rank. The metrics do not change; call
        their ``reset`` to start again.

    Raises:
        TypeError: ``metrics`` holds something else, or none at all.
        DisagreementError: The ranks' metrics differ in place or kind.
        RemoteError: Another rank's metrics could not travel.

    Cost: one header exchange, however many metrics there are; and one more exchange if a rank's values do not fit into
    its header (512 KiB / W in small groups).

    Source: torchmetrics' ``compute``, which gathers once per state.
    """
    named: dict[str, Any] = {}
    spec: tree.Spec

    def states(_: Communicators) -> States:
        nonlocal spec
        leaves, spec = tree.flatten(metrics, lambda value: not tree.is_container(value))
        named.update(zip(spec.paths, leaves, strict=True))
        return _states(named)

    parts = run(GatherStates("compute", states), communicators(group), timeout) or []
    merged = {path: named[path].merged([*every]) for path, every in parts}
    return spec.rebuild([merged[path] for path in named])


def _states(named: dict[str, Any]) -> States:
    """Return the paths of the metrics in one order for all ranks, their kinds and their states."""
    if not named:
        raise TypeError("compute: there is no metric; pass Sums, WeightedMean or Counts")
    for path, metric in named.items():
        if not isinstance(metric, Metric):
            where = path or "the value"
            raise TypeError(f"compute: {where} is {type(metric).__name__}; pass Sums, WeightedMean or Counts")
    paths = sorted(named)
    kinds = {path: type(named[path]).__name__ for path in paths}
    return paths, {"metrics": kinds.get("", kinds)}, tuple([named[path].state() for path in paths])  # "": a single one
