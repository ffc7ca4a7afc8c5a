"""The verb ``reduce``, which computes sums, products, means and extremes over ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.data import packing
from easydist.data.leaves import Layout, Leaves, as_value
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.transport.reduce_op import ReduceOp, combine
from easydist.transport.work import ENDED, Begun, TorchWork
from easydist.typing import Group, Reduction, Timeout, Tree
from easydist.verbs.buckets import LARGE, by_comm, copied, in_turns, small_payload
from easydist.verbs.gradients import Adjoint, Gradient, demand_everyone, has_gradient, with_own_gradient
from easydist.verbs.moving import ahead
from easydist.verbs.ranks import check_rank, named_rank
from easydist.verbs.reductions import BITWISE, OPS, check_dtypes, named_reduction
from easydist.verbs.trees import TreeVerb, leaves_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["reduce"]


_LINEAR = ("sum", "mean", "none")
"""The reductions whose results have a gradient."""


@overload
def reduce(
    tensor: torch.Tensor,
    reduction: Reduction | ReduceOp = "mean",
    scale: float = 1.0,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> torch.Tensor: ...
@overload
def reduce(
    tensor: NDArray[Any],
    reduction: Reduction | ReduceOp = "mean",
    scale: float = 1.0,
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> NDArray[Any]: ...
@overload
def reduce(
    tensor: Tree,
    reduction: Reduction | ReduceOp = "mean",
    scale: float = 1.0,
    *,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree: ...
@eager
def reduce(
    tensor: Tree,
    reduction: Reduction | ReduceOp = "mean",
    scale: float = 1.0,
    *,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
    differentiable: bool = False,
) -> Tree:
    """Combine the ranks' trees, leaf by leaf, in rank order; every rank gets the same bits in every run.

    Law: ``reduce(x, "sum") == (x of rank 0 + x of rank 1) + …`` (ranks that share memory first, then host by host; NCCL
    uses its own order), likewise ``"prod"``, ``"max"`` and ``"min"`` (the last two propagate NaN); ``"and"``, ``"or"``
    and ``"xor"`` are ``&``, ``|`` and ``^``, which work on the bits of integers; ``"mean"`` is the sum divided by W;
    ``"none"`` is this rank's own ``x``. The result is multiplied by ``scale``.

    Dtypes follow ``torch.sum``. ``"sum"`` and ``"prod"`` of integers and bools are int64, so that small dtypes do not
    wrap; beyond 64 bits tensors and arrays wrap, as in ``torch.sum``, and Python ints raise an error. Their ``"mean"``,
    and any of their reductions times a ``scale`` other than 1, has the default float dtype (float64 for arrays and
    Python numbers). All other results keep their dtype. Floats of 16 and 8 bits are accumulated in float32, means of
    integers in float64, and rounded once.

    Example:
        >>> import torch, easydist
        >>> easydist.reduce({"loss": torch.tensor(2.0), "right": 3}, "sum")
        {'loss': tensor(2.), 'right': 3}

    On two ranks::

        easydist.reduce({"loss": 0.5 + rank, "rows": 3}, "sum")  # both ranks: {'loss': 2.0, 'rows': 6}
        easydist.reduce(rank + 1.0, dst=0)  # rank 0: 1.5   rank 1: None

    Args:
        tensor: Any tree, with the same shapes on every rank. Python numbers stay Python numbers, and NumPy arrays stay
            arrays.
        reduction: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"prod"``, ``"and"``, ``"or"``, ``"xor"`` or
            ``"none"``, in upper or lower case; or a ``ReduceOp`` of torch or of ``easydist.comms``. ``AVG`` is
            ``"mean"``; ``PREMUL_SUM(factor)`` is ``"sum"`` with ``scale`` times that factor, which is the same on all
            ranks.
        scale: A factor for the result.
        dst: The only rank that gets the result, a rank inside the group; None for all ranks. With a group of torch, it
            must be the same rank of the world.
        group: The ranks that take part.
        group_dst: The same as ``dst``, for any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.
        differentiable: True to give the result its exact gradient, which takes an exchange in backward, on all ranks:
            see "Gradients" in the documentation.

    Returns:
        A new tree of the same structure; None on ranks other than ``dst``. With ``"sum"``, ``"mean"`` and ``"none"``,
        while grad mode is on, results of leaves that require grad have the derivative with respect to this rank's own
        leaf (``scale``, divided by W for a mean), without an exchange in backward; pass ``x.detach()`` to avoid that.
        Other results are detached.

    Raises:
        ValueError: There is no reduction of this name; ``dst`` is not a rank of the group, or is ambiguous, or is
            passed together with ``differentiable``.
        TypeError: ``"max"`` or ``"min"`` of complex numbers, or ``"and"``, ``"or"`` or ``"xor"`` of floats; a factor of
            ``PREMUL_SUM`` that is not one number; or a leaf is not a dense tensor (sparse, DTensor, …). With
            ``differentiable``: the reduction has no gradient, or no leaf has a floating-point or complex dtype.
        OverflowError: The sum or product of Python ints does not fit 64 bits; every rank raises this.
        DisagreementError: Paths, dtypes, shapes, ``reduction`` or ``scale`` differ between ranks.
        RemoteError: Another rank's tree could not be reduced.

    Cost: one header exchange, which carries a small tree (512 KiB / W in small groups); for a larger one an all-reduce
    per accumulation dtype, and in shared memory one more for all leaves of 256 KiB and more; of those that are
    accumulated in another dtype, one for each 256 Ki elements. No all-reduce for ``"none"``. With ``dst``, each other
    rank sends a larger tree once, to ``dst``.

    Source: accelerate's ``reduce``.
    """
    dst = named_rank(group, "reduce", "dst", dst, group_dst)
    gradient = Gradient(timeout, check) if differentiable else None
    return run(Reduce(tensor, reduction, scale, dst, gradient), communicators(group), timeout, check)


_CHUNK, _CHUNKS = 1 << 20, 8
"""The least bytes of the chunks that are reduced to one rank, and their most number for each rank of the group."""


_CONVERTED = 1 << 18
"""The elements that are converted and reduced at a time, where a large leaf is accumulated in another dtype."""


class _DtypeGroup(NamedTuple):
    """Leaves that are reduced together, and the dtype in which their values are accumulated."""

    dtype: torch.dtype
    members: Sequence[int]
    is_run: bool = False
    """True if these are all leaves of one dtype, and the values are accumulated in it."""
    is_bound: bool = False
    """True for a second reduction of integers, as floats, which shows whether the exact result fits 64 bits."""
    is_finished: bool = False
    """True if the total is the result of a single leaf, with the mean and the scale applied."""


_Total = tuple[_DtypeGroup, torch.Tensor]
"""A group of leaves, and their total over all ranks."""

_Begun = tuple[_DtypeGroup, torch.Tensor, TorchWork]
"""The same before the work has ended."""

_Reduced = tuple[dict[int, torch.Tensor], list[_Total]]
"""The results by index, and the totals that show whether integers have wrapped."""


class Reduce(TreeVerb):
    """The verb itself, and the exchange of its backward pass."""

    operation = "reduce"
    needs_headers = False

    _reduction: str
    _scale: float

    def __init__(
        self, tensor: Tree, reduction: Any, scale: float, dst: int | None = None, gradient: Gradient | None = None
    ) -> None:
        self._tensor, self._asked, self._dst, self.gradient = tensor, (reduction, scale), dst, gradient
        if gradient is not None:
            self.needs_headers = True  # they tell which leaves require grad

    def prepare(self, comms: Communicators) -> Call:
        dst = check_rank(comms, self.operation, "dst", self._dst)
        self._reduction, self._scale = reduction, scale = named_reduction(*self._asked)
        if self.gradient is not None:
            demand_everyone(self.operation, self._dst)
            if reduction not in _LINEAR:
                raise TypeError(
                    f"reduce: differentiable=True takes 'sum', 'mean' and 'none'; {reduction!r} has no gradient"
                )
        leaves = leaves_of(self._tensor, "reduce")
        check_dtypes(leaves, reduction)
        arguments: dict[str, Any] = {"reduction": reduction, "scale": scale}
        if dst is not None:
            arguments["dst"] = dst
        call = Call(arguments, leaves, nbytes=leaves.layout.packing.nbytes)
        if payload := small_payload(comms, leaves):
            groups = _groups(leaves.layout, leaves.travelling(True), reduction)
            call.payload = payload
            if not all(group.is_run for group in groups):
                call.payload = [_flat(leaves, group.dtype, group.members) for group in groups]
                call.nbytes = sum(map(packing.nbytes, call.payload))
        return call if self.gradient is None else self.gradient.ask(call, leaves, comms)

    def exchange(self, comms: Communicators, agreed: Agreement) -> _Reduced | None:
        op, leaves = OPS[self._reduction], agreed.call.tree
        if comms.size == 1:
            return self._alone(leaves, agreed.uniform), []
        if agreed.has_payload and op is not None and agreed.call.payload:
            return None
        travelling = leaves.travelling(agreed.uniform)
        every = by_comm(comms, leaves.tensors, travelling, leaves.layout.packing.nbytes)
        begun = (
            one
            for comm, indices in every
            for group in _groups(leaves.layout, indices, self._reduction)
            for one in self._begun(comm, leaves, group, op)
        )
        return self._finished(comms, leaves, map(_waited, ahead(begun, *[comm for comm, _ in every])))

    def _begun(self, comm: Collectives, leaves: Leaves, group: _DtypeGroup, op: ReduceOp | None) -> Iterator[_Begun]:
        """Begin to reduce a group. In shared memory, large leaves are not packed, and the others in turns."""
        dst, dtypes = None if group.is_bound else self._dst, leaves.layout.dtypes
        if not comm.backend.shares_memory:
            yield group, *_begin(comm, leaves, group, op, dst)
            return
        first, *others = in_turns(group.members, leaves.layout.packing.lengths, LARGE)
        together = [i for i in first.alone if op is not None and dst is None and dtypes[i] is group.dtype]
        if op is not None and together:
            yield from _begin_together(comm, leaves, group, together, op)
        for i in sorted({*first.alone}.difference(together)):
            part = group._replace(members=[i])
            if op is None or dtypes[i] is group.dtype:
                yield part, *_begin(comm, leaves, part, op, dst)
            else:
                yield self._begin_converted(comm, leaves, part, op)
        for bucket in (first, *others) if first.packed else ():
            part = group._replace(members=bucket.packed)
            yield part, *_begin(comm, leaves, part, op, dst)

    def _begin_converted(self, comm: Collectives, leaves: Leaves, group: _DtypeGroup, op: ReduceOp) -> _Begun:
        """Begin to reduce a leaf piece by piece, so that little of it is in the other dtype at a time."""
        [leaf] = group.members
        data = leaves.tensors[leaf].detach().to(comm.get_device()).reshape(-1)
        kind = _dtype_of(leaves, leaf, self._reduction, self._scale)  # may differ between ranks
        is_receiver = self._dst in (None, comm.get_rank())
        result = memory.empty([data.numel() if is_receiver else 0], kind, comm.get_device())
        outs = result.split(_CONVERTED) if is_receiver else itertools.repeat(None)
        pieces = zip(data.split(_CONVERTED), outs, strict=False)
        work = TorchWork(_later(comm, (self._converted(comm, piece, group.dtype, op, out) for piece, out in pieces)))
        return group._replace(is_finished=True), result, work

    def _converted(
        self, comm: Collectives, piece: torch.Tensor, dtype: torch.dtype, op: ReduceOp, out: torch.Tensor | None
    ) -> TorchWork:
        """Begin to reduce a piece in another dtype; at the end, ``out`` has the result on the ranks that get it."""
        total, dst = piece.to(dtype, copy=True), self._dst

        def finish() -> Sequence[Begun]:
            if out is not None:
                out.copy_(_finish(total, self._reduction, self._scale, comm.get_size()))
            return ()

        work = comm.all_reduce(total, op, async_op=True) if dst is None else comm.reduce(total, dst, op, async_op=True)
        return work.followed_by(finish)

    def _finished(self, comms: Communicators, leaves: Leaves, totals: Iterable[_Total]) -> _Reduced:
        """Return the results of the totals, with the mean and the scale applied."""
        results, bounds = dict[int, torch.Tensor](), list[_Total]()
        for group, flat in totals:
            if group.is_bound:
                bounds.append((group, flat))
            elif self._dst in (None, comms.rank) and group.is_finished:
                leaf = group.members[0]
                results[leaf] = flat.view(leaves.layout.shapes[leaf]).to(leaves.tensors[leaf].device)
            elif self._dst in (None, comms.rank):
                total = _finish(flat, self._reduction, self._scale, comms.size)
                results |= _results(leaves, group.members, total, self._reduction, self._scale)
            del flat  # and its memory, before the next one begins
        return results, bounds

    def result(self, comms: Communicators, agreed: Agreement, arrived: _Reduced | None) -> Tree:
        reduction, scale, leaves = self._reduction, self._scale, agreed.call.tree
        results, bounds = arrived or self._finished(comms, leaves, self._from_payloads(comms, agreed))
        for group, flat in bounds:
            _check_bound(leaves, group.members, flat, reduction, comms.size)
        if self._dst not in (None, comms.rank):
            return None
        if self.gradient is not None:
            results = self.gradient.join(leaves.values, results, _adjoint(self.gradient, reduction, scale))
        elif leaves.requires_grad and reduction in _LINEAR and torch.is_grad_enabled():
            divisor = comms.size if reduction == "mean" else 1
            results = with_own_gradient(leaves.values, results, lambda own: _scaled(own, divisor, scale))
        return leaves.rebuild(results, agreed.uniform, as_value)

    def _alone(self, leaves: Leaves, tied: bool) -> dict[int, torch.Tensor]:
        """Return the results of a single rank."""
        reduction, scale, dtypes = self._reduction, self._scale, leaves.layout.dtypes
        indices, results = leaves.travelling(tied), dict[int, torch.Tensor]()
        if scale == 1.0 and all(map(has_gradient, set(dtypes))):
            return copied(leaves, indices)
        for i in indices:
            wide = leaves.tensors[i].to(
                _accumulated_in(dtypes[i], reduction), copy=True, memory_format=torch.contiguous_format
            )
            results[i] = _finish(wide, reduction, scale, 1).to(_dtype_of(leaves, i, reduction, scale))
        return results

    def _from_payloads(self, comms: Communicators, agreed: Agreement) -> Iterator[_Total]:
        """Reduce the data that came with the headers."""
        op, leaves, payload = OPS[self._reduction], agreed.call.tree, agreed.call.payload
        assert op is not None
        if payload is leaves.tensors:
            columns: Iterable[Sequence[torch.Tensor]] = agreed.packed().flat
        else:
            dtypes, shapes = [flat.dtype for flat in payload], [flat.shape for flat in payload]
            columns = zip(*[packing.unpack(agreed.payload(r), dtypes, shapes) for r in range(comms.size)], strict=True)
        groups = _groups(leaves.layout, leaves.travelling(agreed.uniform), self._reduction)
        for group, parts in zip(groups, columns, strict=True):
            yield group, combine(op, parts)


def _adjoint(gradient: Gradient, reduction: str, scale: float) -> Adjoint:
    """Return the transpose, which is the same reduction of the gradients; ``"none"`` needs no exchange for it."""

    def adjoint(indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if reduction == "none":
            return [_scaled(one, 1, scale) for one in gradients]
        found: Sequence[torch.Tensor] = gradient.run(lambda own: Reduce([*gradients], reduction, scale, None, own))
        return found

    return adjoint


def _scaled(own: torch.Tensor, divisor: int, scale: float) -> torch.Tensor:
    """Return the gradient of this rank's own part of a result; floats of 8 bits have no arithmetic."""
    wide = own.to(torch.float32) if own.element_size() == 1 else own
    wide = wide if divisor == 1 else wide / divisor
    return (wide if scale == 1.0 else wide * scale).to(own.dtype)


def _waited(begun: _Begun) -> _Total:
    group, total, work = begun
    work.wait()
    return group, total


def _begin(
    comm: Collectives, leaves: Leaves, group: _DtypeGroup, op: ReduceOp | None, dst: int | None
) -> tuple[torch.Tensor, TorchWork]:
    """Begin to reduce; return the total, which is valid on ``dst`` once the work has ended, and the work."""
    dtype, members = group.dtype, group.members
    data = leaves.tensors[members[0]]
    if op is not None and len(members) == 1 and data.dtype is dtype and data.is_cpu and data.is_contiguous():
        if dst is None:
            total = memory.empty([data.numel()], dtype)
            return total, comm.all_reduce_from(total, data, op, async_op=True)
        if dst != comm.get_rank():
            return data, _reduce_to(comm, data.detach().view(-1), dst, op)  # data changes on dst alone
    total = _flat(leaves, dtype, members).to(comm.get_device())
    if op is None:
        return total, TorchWork()
    work = comm.all_reduce(total, op, async_op=True) if dst is None else _reduce_to(comm, total, dst, op)
    return total, work


def _begin_together(
    comm: Collectives, leaves: Leaves, group: _DtypeGroup, members: Sequence[int], op: ReduceOp
) -> list[_Begun]:
    """Begin to reduce leaves of the group's dtype as one operation, each into memory of its own."""
    data = [leaves.tensors[i].detach().to(comm.get_device()).contiguous().view(-1) for i in members]
    totals = [memory.empty([len(one)], group.dtype, comm.get_device()) for one in data]
    work = comm.all_reduce_parts(totals, data, op, async_op=True)
    return [(group._replace(members=[i]), total, work) for i, total in zip(members, totals, strict=True)]


def _reduce_to(comm: Collectives, flat: torch.Tensor, dst: int, op: ReduceOp) -> TorchWork:
    """Reduce a flat tensor to one rank, which needs memory for the parts of all ranks: in chunks, two at a time."""
    length = max(_CHUNK // flat.element_size(), flat.numel() // (_CHUNKS * comm.get_size()))
    if not comm.backend.collects or not flat.is_cpu or flat.numel() <= length:
        return comm.reduce(flat, dst, op, async_op=True)
    begun = (comm.reduce(chunk, dst, op, async_op=True) for chunk in flat.split(length))
    return TorchWork(ahead(begun, comm))


def _later(comm: Collectives, begun: Iterator[TorchWork]) -> Iterator[Begun]:
    """Do as ``ahead``, but begin the first operation only when it is waited for."""
    yield ENDED
    yield from ahead(begun, comm)


def _flat(leaves: Leaves, dtype: torch.dtype, members: Sequence[int]) -> torch.Tensor:
    """Concatenate leaves into a new flat tensor."""
    tensors = [leaves.tensors[i] for i in members]
    flat = memory.empty([sum(map(torch.Tensor.numel, tensors))], dtype, tensors[0].device)
    if {leaves.layout.dtypes[i] for i in members} == {dtype}:
        packing.pack(tensors, out=packing.as_bytes(flat))
        return flat
    start = 0
    for own, alike in itertools.groupby(tensors, key=attrgetter("dtype")):
        values = packing.pack([*alike], flat.device).view(own)  # converted together
        flat[start : start + len(values)].copy_(values)
        start += len(values)
    return flat


def _results(
    leaves: Leaves, members: Sequence[int], total: torch.Tensor, reduction: str, scale: float
) -> dict[int, torch.Tensor]:
    """Return each leaf's part of the total, in the dtype of its result and on its own device."""
    dtypes = leaves.layout.dtypes
    shapes = [leaves.layout.shapes[i] for i in members]
    if leaves.is_cpu and has_gradient(total.dtype) and {dtypes[i] for i in members} == {total.dtype}:
        return dict(zip(members, packing.separate(total, shapes), strict=True))
    kinds = [(leaves.tensors[i].device, _dtype_of(leaves, i, reduction, scale)) for i in members]
    found, first, start = dict[int, torch.Tensor](), 0, 0
    for kind, alike in itertools.groupby(kinds):
        last = first + sum(1 for _ in alike)
        stop = start + sum(map(math.prod, shapes[first:last]))
        # A single piece would share the memory of the total with the others.
        part = total[start:stop].to(*kind, copy=last - first == 1 < len(members))
        found |= dict(zip(members[first:last], packing.separate(part, shapes[first:last]), strict=True))
        first, start = last, stop
    return found


def _check_bound(leaves: Leaves, members: Sequence[int], bound: torch.Tensor, reduction: str, size: int) -> None:
    """Check that no Python int has wrapped; the margin covers the rounding of the floats."""
    margin = 1 - 2 * size * torch.finfo(bound.dtype).eps
    fits = (bound.abs() < 2.0**63 * margin).tolist()
    wrapped = [i for i, fit in zip(members, fits, strict=True) if not fit and isinstance(leaves.values[i], int)]
    if wrapped:
        raise OverflowError(
            f"reduce: the {reduction} of {leaves.layout.paths[wrapped[0]] or 'the number'} over {size} ranks does not "
            "fit 64 bits; reduce a float, or combine the numbers of gather_object"
        )


def _groups(layout: Layout, indices: Sequence[int], reduction: str) -> Sequence[_DtypeGroup]:
    """Return the groups of leaves that are reduced together; large items come first, as in a packed buffer."""
    return _grouped(layout, indices if type(indices) is range else tuple(indices), reduction)


@functools.lru_cache(maxsize=256)
def _grouped(layout: Layout, indices: Sequence[int], reduction: str) -> Sequence[_DtypeGroup]:
    dtypes = layout.dtypes
    accumulated = {dtype: _accumulated_in(dtype, reduction) for dtype in set(dtypes)}
    groups: dict[torch.dtype, list[int]] = {}
    for i in indices:
        groups.setdefault(accumulated[dtypes[i]], []).append(i)
    is_whole = len(indices) == len(dtypes)
    runs = [_DtypeGroup(dtype, i, is_whole and {dtypes[one] for one in i} == {dtype}) for dtype, i in groups.items()]
    # A leaf may be a Python number on one rank and a tensor on another: choose by dtype and shape, which are the same.
    if reduction in ("sum", "prod"):
        single = [i for i in indices if dtypes[i] is torch.int64 and not layout.shapes[i]]
        runs += [_DtypeGroup(torch.float64, single, is_bound=True)] if single else []
    return sorted(runs, key=lambda group: packing.sort_key(group.dtype))


_EXACT = frozenset(("max", "min", "none", *BITWISE))


def _accumulated_in(dtype: torch.dtype, reduction: str) -> torch.dtype:
    if reduction in _EXACT:
        return dtype
    if dtype.is_complex or dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32) if dtype.itemsize >= 2 else torch.float32
    return torch.float64 if reduction == "mean" else torch.uint64 if dtype is torch.uint64 else torch.int64


def _finish(total: torch.Tensor, reduction: str, scale: float, size: int) -> torch.Tensor:
    """Apply the mean and the scale, in place if the dtype allows it; return the result."""
    if reduction == "mean" and size > 1:
        total /= size
    if scale == 1.0:
        return total
    if total.is_complex() or (total.is_floating_point() and total.element_size() > 1):
        return total.mul_(scale)
    return total.to(torch.float64) * scale


def _dtype_of(leaves: Leaves, index: int, reduction: str, scale: float) -> torch.dtype:
    """Return the dtype of a leaf's result."""
    dtype: torch.dtype = leaves.layout.dtypes[index]
    if has_gradient(dtype):
        return dtype
    if reduction == "mean" or scale != 1.0:
        return torch.get_default_dtype() if isinstance(leaves.values[index], torch.Tensor) else torch.float64
    if reduction in ("sum", "prod"):
        return torch.uint64 if dtype is torch.uint64 else torch.int64
    return dtype
