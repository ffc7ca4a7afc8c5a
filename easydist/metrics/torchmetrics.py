"""One exchange for the states of torchmetrics' metrics on all ranks. It does not import torchmetrics itself."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.data.structure import send_to_device
from easydist.metrics.states import GatherStates, States
from easydist.state import communicators
from easydist.typing import Group, Timeout

__all__ = ["dist_sync_fn", "sync_dist"]


@eager
def sync_dist(metric: Any, *, group: Group = None, check: bool | None = None, timeout: Timeout | None = None) -> Any:
    """Compute a metric, or a collection of them, over the data of all ranks.

    Law: ``sync_dist(m)`` is the ``m.compute()`` of one process that has seen the data of rank 0, …, rank W-1. Holds at
    W = 1, too. A following ``m.compute()`` returns the same without an exchange, until ``m`` is updated or reset. The
    rank's own states do not change, so more data can follow.

    Args:
        metric: A ``Metric``, a ``MetricCollection``, or a wrapper such as ``ClasswiseWrapper``, with the same states on
            all ranks. List states may differ in length and in rows. A rank may have no data at all.
        group: The participating ranks.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        The result of ``metric.compute()``, on every rank.

    Raises:
        TypeError: It is not a metric, or one whose states cannot be determined (``Running``, or one with a
            ``_sync_dist`` of its own).
        ValueError: A metric has been synced already.
        DisagreementError: The ranks' metrics differ in kind or in states.
        RemoteError: Another rank's states could not travel.

    Cost: one header exchange, which also carries small states (512 KiB / W in small groups); one more exchange for
    larger ones, whatever the number of metrics and states. States on an accelerator travel through the CPU.

    Source: ``torchmetrics.Metric.sync``, which needs a barrier and one or two exchanges for each state.
    """
    parts = run(GatherStates("sync_dist", lambda _: _states(metric)), communicators(group), timeout, check) or []
    counts = [part._update_count for part, _ in parts]
    try:
        for part, every in parts:
            _compute(part, every)
        return metric.compute()
    finally:
        for (part, _), count in zip(parts, counts, strict=True):
            part._update_count = count


@eager
def dist_sync_fn(result: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Gather the tensors of a state from all ranks, for ``Metric(dist_sync_fn=…)``.

    All states that torchmetrics requests before it reads the first result travel in one exchange: those of a metric.
    A collection needs one exchange per metric, while ``sync_dist`` needs one for all. Use ``sync_dist`` for lists
    without a reduction (retrieval metrics, ROUGE, ``MeanAveragePrecision``): torchmetrics passes their elements one by
    one, without naming the list, so here all ranks would need the same number of them.

    Example:
        >>> import torch, easydist
        >>> easydist.metrics.dist_sync_fn(torch.ones(2))
        [tensor([1., 1.])]

    Args:
        result: A state. Its size may differ between ranks, and may be zero.
        group: The participating ranks.

    Returns:
        A list of the ranks' tensors, filled on first access; torch's own functions do not see that, and take
        ``[*found]``. This rank's own is ``result`` itself.

    Raises:
        DisagreementError: On first access to the list: the ranks have passed different numbers of states.
        ValueError: On first access to the list: a state has been changed in place since.

    Cost: one header exchange for all states of a metric, and one more exchange if they are large.

    Source: ``torchmetrics.utilities.distributed.gather_all_tensors``.
    """
    batch = _open.batch()
    if batch is None or batch.rows or batch.group is not group:
        batch = _StateBucket(group)
        _open.batch = weakref.ref(batch)
    batch.add(result)
    return _Gathered(batch, len(batch.tensors) - 1)


_State = tuple[int, tuple[Any, ...]]
"""The part of one metric that travels: its number of updates, and its states in their order."""


# --- sync_dist


def _states(metric: Any) -> States:
    """Return the metrics that have states of their own, their descriptions, and the states."""
    metrics = list(_with_states(metric))
    names = [f"{type(each).__name__}({', '.join(each._reductions)})" for each in metrics]
    joined: dict[int, Any] = {}
    return metrics, {"states": names}, tuple([(each._update_count, tuple(_values(each, joined))) for each in metrics])


def _with_states(metric: Any) -> Iterator[Any]:
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.wrappers import Running
    from torchmetrics.wrappers.abstract import WrapperMetric

    if not isinstance(metric, Metric | MetricCollection):
        raise TypeError(f"sync_dist: takes a Metric or a MetricCollection, got {type(metric).__name__}")
    for each in metric.modules():
        if isinstance(each, MetricCollection):
            each.values(copy_state=False)  # from now on, metrics that share their states refer to them
    for each in metric.modules():
        if isinstance(each, Running):
            raise TypeError("sync_dist: only Running itself knows its states; pass the metric that it wraps")
        if isinstance(each, Metric) and each._reductions and not isinstance(each, WrapperMetric):
            _check(each, Metric)
            yield each


def _check(metric: Any, base: Any) -> None:
    kind = type(metric)
    if kind._sync_dist is not base._sync_dist and not kind.__module__.startswith("torchmetrics."):
        raise TypeError(f"sync_dist: {kind.__name__} has a _sync_dist of its own; call its sync()")
    if metric._is_synced:
        raise ValueError(f"sync_dist: {kind.__name__} has been synced already; call its unsync() first")


def _values(metric: Any, joined: dict[int, Any]) -> Iterator[Any]:
    """Yield the states. Lists that will be concatenated are concatenated once for all metrics that share them."""
    from torchmetrics.utilities import dim_zero_cat

    for name, reduction in metric._reductions.items():
        value = getattr(metric, name)
        if isinstance(value, list) and value and reduction is dim_zero_cat:
            if id(value) not in joined:
                joined[id(value)] = [dim_zero_cat(value)]
            value = joined[id(value)]
        yield value


def _compute(metric: Any, every: Sequence[_State]) -> None:
    """Compute the metric's value from the states of all ranks, keep it, and restore the metric's own states."""
    own = {name: getattr(metric, name) for name in [*metric._reductions, "_to_sync", "compute_with_cache"]}
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    try:
        for i, (name, reduction) in enumerate(metric._reductions.items()):
            values = [send_to_device(states[i], device) for _, states in every]
            setattr(metric, name, _merged(values, reduction, isinstance(metric._defaults[name], list)))
        metric._update_count = sum(count for count, _ in every)
        metric._computed, metric._to_sync, metric.compute_with_cache = None, False, True
        metric.compute()
    finally:
        for name, value in own.items():
            setattr(metric, name, value)


def _merged(values: Sequence[Any], reduction: Callable[[Any], Any] | None, is_list: bool) -> Any:
    """Merge one state of all ranks. Of lists, first all first elements, then all second ones, as torchmetrics does."""
    if is_list:
        lists = [value if isinstance(value, list) else [value] for value in values]
        merged: Any = [each[i] for i in range(max(map(len, lists))) for each in lists if i < len(each)]
    else:
        merged = torch.stack(list(values))
    return merged if reduction is None or (is_list and not merged) else reduction(merged)


# --- dist_sync_fn


class _StateBucket:
    """States that travel together when the first of them is read."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tensors: list[torch.Tensor] = []
        self.rows: list[Any] = []
        self._versions: list[int] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add a state. One that torch does not track is copied, because nobody could tell whether it has changed."""
        self.tensors.append(tensor.clone() if tensor.is_inference() else tensor)
        self._versions.append(0 if tensor.is_inference() else tensor._version)

    def _unchanged(self) -> tuple[torch.Tensor, ...]:
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if not tensor.is_inference() and tensor._version != version:
                raise ValueError(
                    "dist_sync_fn: a state has changed since the call; read the result first, or pass a copy"
                )
        return tuple(self.tensors)

    def row(self, index: int) -> list[torch.Tensor]:
        if not self.rows:
            numbers = range(len(self.tensors))
            states = {"states": list(map(str, numbers))}
            verb = GatherStates("sync_dist", lambda _: (numbers, states, self._unchanged()))
            rows = run(verb, communicators(self.group))
            self.rows = rows or []
        return _fitting(self.rows[index][1])


def _fitting(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Adapt the empty tensors of ranks without data, as torchmetrics gives them another dtype and shape."""
    like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    return [
        like.new_empty(0, *like.shape[1:]) if tensor.shape == (0,) and like.ndim else tensor.to(like.device)
        for tensor in tensors
    ]


class _OpenBucket(threading.local):
    """The batch of this thread that more states may join. It lives as long as one of its results."""

    batch: Callable[[], _StateBucket | None] = staticmethod(lambda: None)


_open = _OpenBucket()


class _Gathered(list[torch.Tensor]):
    """All ranks' tensors of one state, gathered on first access."""

    def __init__(self, batch: _StateBucket, index: int) -> None:
        super().__init__()
        self._pending: tuple[_StateBucket, int] | None = batch, index

    def fill(self) -> None:
        """Gather the tensors, unless they are here."""
        if self._pending is not None:
            batch, index = self._pending
            list.extend(self, batch.row(index))
            self._pending = None

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)


def _filled_first(name: str) -> Callable[..., Any]:
    """Return a method of lists that fills this one first."""

    @functools.wraps(method := getattr(list, name))
    def call(gathered: _Gathered, *args: Any, **kwargs: Any) -> Any:
        gathered.fill()
        return method(gathered, *args, **kwargs)

    return call


_OF_ALL_OBJECTS = {"__eq__", "__ne__", "__repr__"}
for _name in (vars(list).keys() - vars(object).keys() - {"__class_getitem__"}) | _OF_ALL_OBJECTS:
    setattr(_Gathered, _name, _filled_first(_name))
