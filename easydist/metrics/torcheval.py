"""torcheval's toolkit: its metrics over all ranks, in one exchange. It does not import torcheval itself."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.data.structure import send_to_device
from easydist.groups.communicators import Communicators
from easydist.metrics.states import GatherStates, States
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.ranks import check_rank

__all__ = [
    "get_synced_metric",
    "get_synced_metric_collection",
    "get_synced_state_dict",
    "get_synced_state_dict_collection",
    "sync_and_compute",
    "sync_and_compute_collection",
]

_Recipient: TypeAlias = int | Literal["all"]


@eager
def sync_and_compute(
    metric: Any,
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Compute a torcheval metric over the data of all ranks.

    Law: ``sync_and_compute(m) == m of rank 0 .merge_state([m of rank 1, …, m of rank W-1]).compute()``, the same on all
    ranks. Holds at W = 1, too. The rank's own metric does not change, so more data can follow.

    Args:
        metric: A ``torcheval.metrics.Metric`` with the same states on all ranks: tensors, lists, dicts, deques and
            numbers. Lists and dicts may differ in length, keys and shapes. A rank may have no data at all.
        process_group: The participating ranks.
        recipient_rank: The only rank of the group that gets the result; "all" means every rank.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        The result of ``compute()``; None on ranks other than ``recipient_rank``.

    Raises:
        TypeError: It is not a metric of torcheval.
        ValueError: ``recipient_rank`` is neither a rank of the group nor "all".
        DisagreementError: The ranks' metrics differ in kind or in states.
        RemoteError: Another rank's states could not travel.

    Cost: one header exchange, which also carries small states (512 KiB / W in small groups); one more exchange for
    larger ones, whatever the number of states. States on an accelerator travel through the CPU.

    Source: ``torcheval.metrics.toolkit.sync_and_compute``, which exchanges each tensor of each state by itself.
    """
    synced = _synced("sync_and_compute", {"": metric}, process_group, recipient_rank, check, timeout)
    return None if synced is None else synced[""].compute()


@eager
def sync_and_compute_collection(
    metrics: Mapping[str, Any],
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> dict[str, Any] | None:
    """Compute many torcheval metrics over the data of all ranks, in one exchange.

    Law: ``sync_and_compute_collection(ms) == {name: sync_and_compute(m) for name, m in ms.items()}``.

    Args:
        metrics: Metrics by name, the same names on all ranks.
        process_group: The participating ranks.
        recipient_rank: As in ``sync_and_compute``.
        check: As in ``sync_and_compute``.
        timeout: As in ``sync_and_compute``.

    Returns:
        The results by name; None on ranks other than ``recipient_rank``.

    Raises:
        Exception: As ``sync_and_compute``.

    Cost: that of ``sync_and_compute`` of one metric.

    Source: ``torcheval.metrics.toolkit.sync_and_compute_collection``.
    """
    synced = _synced("sync_and_compute_collection", metrics, process_group, recipient_rank, check, timeout)
    return None if synced is None else {name: metric.compute() for name, metric in synced.items()}


@eager
def get_synced_metric(
    metric: Any,
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Return a new torcheval metric that has the data of all ranks.

    Law: ``get_synced_metric(m)`` is ``m of rank 0 .merge_state([m of rank 1, …, m of rank W-1])``, on the device of
    this rank's metric, which does not change. Holds at W = 1, too.

    Args:
        metric: As in ``sync_and_compute``.
        process_group: The participating ranks.
        recipient_rank: As in ``sync_and_compute``.
        check: As in ``sync_and_compute``.
        timeout: As in ``sync_and_compute``.

    Returns:
        The new metric; None on ranks other than ``recipient_rank``.

    Raises:
        Exception: As ``sync_and_compute``.

    Cost: that of ``sync_and_compute``.

    Source: ``torcheval.metrics.toolkit.get_synced_metric``.
    """
    synced = _synced("get_synced_metric", {"": metric}, process_group, recipient_rank, check, timeout)
    return None if synced is None else synced[""]


@eager
def get_synced_metric_collection(
    metric_collection: Mapping[str, Any],
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> dict[str, Any] | None:
    """Return new torcheval metrics that have the data of all ranks, in one exchange.

    Law: ``get_synced_metric_collection(ms)`` is ``{name: get_synced_metric(m) for name, m in ms.items()}``.

    Args:
        metric_collection: Metrics by name, the same names on all ranks.
        process_group: The participating ranks.
        recipient_rank: As in ``sync_and_compute``.
        check: As in ``sync_and_compute``.
        timeout: As in ``sync_and_compute``.

    Returns:
        The new metrics by name; None on ranks other than ``recipient_rank``.

    Raises:
        Exception: As ``sync_and_compute``.

    Cost: that of ``sync_and_compute`` of one metric.

    Source: ``torcheval.metrics.toolkit.get_synced_metric_collection``.
    """
    return _synced("get_synced_metric_collection", metric_collection, process_group, recipient_rank, check, timeout)


@eager
def get_synced_state_dict(
    metric: Any,
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> dict[str, Any]:
    """Return the state dict of a torcheval metric that has the data of all ranks, to be saved.

    Law: ``get_synced_state_dict(m) == get_synced_metric(m).state_dict()``.

    Args:
        metric: As in ``sync_and_compute``.
        process_group: The participating ranks.
        recipient_rank: As in ``sync_and_compute``.
        check: As in ``sync_and_compute``.
        timeout: As in ``sync_and_compute``.

    Returns:
        The state dict; an empty dict on ranks other than ``recipient_rank``.

    Raises:
        Exception: As ``sync_and_compute``.

    Cost: that of ``sync_and_compute``.

    Source: ``torcheval.metrics.toolkit.get_synced_state_dict``.
    """
    synced = _synced("get_synced_state_dict", {"": metric}, process_group, recipient_rank, check, timeout)
    return {} if synced is None else synced[""].state_dict()


@eager
def get_synced_state_dict_collection(
    metric_collection: Mapping[str, Any],
    process_group: Group = None,
    recipient_rank: _Recipient = "all",
    *,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Return the state dicts of torcheval metrics that have the data of all ranks, in one exchange.

    Law: ``get_synced_state_dict_collection(ms) == {name: get_synced_state_dict(m) for name, m in ms.items()}``.

    Args:
        metric_collection: Metrics by name, the same names on all ranks.
        process_group: The participating ranks.
        recipient_rank: As in ``sync_and_compute``.
        check: As in ``sync_and_compute``.
        timeout: As in ``sync_and_compute``.

    Returns:
        The state dicts by name; None on ranks other than ``recipient_rank``.

    Raises:
        Exception: As ``sync_and_compute``.

    Cost: that of ``sync_and_compute`` of one metric.

    Source: ``torcheval.metrics.toolkit.get_synced_state_dict_collection``.
    """
    operation = "get_synced_state_dict_collection"
    synced = _synced(operation, metric_collection, process_group, recipient_rank, check, timeout)
    return None if synced is None else {name: metric.state_dict() for name, metric in synced.items()}


def _synced(
    operation: str,
    metrics: Mapping[str, Any],
    group: Group,
    recipient: _Recipient,
    check: bool | None,
    timeout: Timeout | None,
) -> dict[str, Any] | None:
    """Return the merged metrics by name; None on ranks other than the recipient."""

    def states(comms: Communicators) -> States:
        if isinstance(dst, str):
            raise ValueError(f"{operation}: recipient_rank={dst!r} is neither a rank of the group nor 'all'")
        check_rank(comms, operation, "recipient_rank", dst)
        return _states(operation, metrics)

    dst = None if recipient == "all" else recipient
    parts = run(GatherStates(operation, states, dst), communicators(group), timeout, check)
    if parts is None:
        return None
    merged = {name: _merged(metrics[name], every) for name, every in parts}
    return {name: merged[name] for name in metrics}


def _states(operation: str, metrics: Mapping[str, Any]) -> States:
    """Return the names of the metrics in one order for all ranks, their descriptions and their states."""
    from torcheval.metrics.metric import Metric

    if not isinstance(metrics, Mapping):
        raise TypeError(f"{operation}: takes metrics of torcheval by name, got {type(metrics).__name__}")
    for metric in metrics.values():
        if not isinstance(metric, Metric):
            raise TypeError(f"{operation}: takes metrics of torcheval, got {type(metric).__name__}")
    names = sorted(metrics)
    states = tuple([_state(metrics[name]) for name in names])
    kinds = [f"{type(metrics[name]).__name__}({', '.join(state)})" for name, state in zip(names, states, strict=True)]
    described = [f"{name}: {kind}" if name else kind for name, kind in zip(names, kinds, strict=True)]
    return names, {"states": described}, states


def _state(metric: Any) -> dict[str, Any]:
    """Return a copy of the states, after the metric's own preparation, which joins lists of tensors."""
    prepared = copy.copy(metric)
    prepared._prepare_for_merge_state()
    state = prepared.state_dict()
    return {name: list(value) if isinstance(value, deque) else value for name, value in state.items()}


def _merged(metric: Any, states: Sequence[dict[str, Any]]) -> Any:
    """Return a new metric with the states of all ranks, merged in rank order."""
    values = [getattr(metric, name) for name in states[0]]
    base = copy.deepcopy(metric, {id(value): value for value in values})  # the states are replaced, so not copied
    return _filled(base, states[0]).merge_state([_filled(copy.copy(metric), state) for state in states[1:]])


def _filled(metric: Any, state: dict[str, Any]) -> Any:
    """Replace the states of a metric, but keep its containers' kinds: a default factory, a longest length."""
    for name, value in send_to_device(state, metric.device).items():
        own = getattr(metric, name)
        if isinstance(own, dict):
            filled = copy.copy(own)
            filled.clear()
            filled.update(value)
            value = filled
        setattr(metric, name, deque(value, own.maxlen) if isinstance(own, deque) else value)
    return metric
