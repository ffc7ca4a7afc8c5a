"""The groups of ``init_process_group("easydist_shm")``: ranks of one host that share memory.

Operations move on by themselves, as gloo's do (``easydist.shm.streams``).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from easydist.base import forks, modes, torch_groups
from easydist.base.eager import eager_methods
from easydist.data.packing import as_bytes
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.rendezvous import NEVER, site
from easydist.liveness.monitor import Monitor
from easydist.shm.slots import TAGS
from easydist.torch_backend.hooks import GroupHooks, OfLaterTorch
from easydist.torch_backend.methods import limited, overloaded, shown_to_modes
from easydist.torch_backend.reductions import add_up, reduction
from easydist.torch_backend.rendezvous import NAME, met
from easydist.torch_backend.work import Filled, GroupWork, TensorList, all_bytes, dense, event, seen
from easydist.transport.backend import Backend
from easydist.transport.checked import About
from easydist.transport.described import OWN, described
from easydist.transport.reduce_op import ReduceOp, combine_into
from easydist.transport.work import Begun

_NOTHING: About = (None, None, None)

_UNEVEN = frozenset(["all_gather", "all_to_all_single"])
"""The operations of torch whose sizes may differ between ranks; a communicator has others for that."""
_MOST_HELD = 100
"""The most works without a waiter that stay alive although nothing in Python refers to them; see ``GroupWork``."""

_Base: Any = dist.ProcessGroup
"""Untyped, because its stubs have overloads that torch does not call."""


@eager_methods
@shown_to_modes
class SharedMemoryGroup(OfLaterTorch, _Base):  # type: ignore[misc]
    """A process group whose ranks share memory, created by ``init_process_group`` and ``new_group``.

    Reductions run in rank order, with float16 and bfloat16 in float32: the same bits on every rank and in every run.
    Tensors may have any strides; those that are not contiguous are copied once more.

    Args:
        backend: Moves the bytes.
        store: The group's store.
        timeout: The limit of one wait.
        monitor: Watches the other processes.

    Attributes:
        timeout: The limit of one wait.
        ending: Held while an operation ends, because several threads may wait for it.
        hooks: Called around each operation, from torch 2.14; None until there are any.
    """

    def __init__(self, backend: Backend, store: Store, timeout: timedelta, monitor: Monitor) -> None:
        super().__init__(backend.rank, backend.size)
        self.timeout = timeout
        self._backend, self._store, self._monitor = backend, store, monitor
        self._compare()
        self._group_name = self._group_desc = ""
        self.ending, self.hooks = threading.Lock(), GroupHooks.at_first(backend.rank, backend.size)
        self._generation = forks.generation
        self._under_way: list[None] = []  # one for each operation: lists change in one step, numbers do not
        self._is_closed = False
        self._batch: list[GroupWork] | None = None
        self._held: list[GroupWork] = []

    def _compare(self) -> None:
        if not self._backend.compares:  # the backend of a communicator does so already
            self._backend.compare(DisagreementError, "The group")

    def __repr__(self) -> str:
        return f"SharedMemoryGroup({self._group_name!r}, rank={self.rank()}, size={self.size()})"

    # The methods that torch requires of every group, under its Python names and, where they differ, its C++ names.

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    def get_group_store(self) -> Store:
        """Return the store in which the ranks have met."""
        return self._store

    @property
    def group_name(self) -> str:
        """The name that distinguishes it from other groups."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """The description given by its creator."""
        return self._group_desc

    def getGroupName(self) -> str:  # noqa: N802
        """Return ``group_name``, for C++."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return ``group_desc``, for C++."""
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        # None before torch knows the group: torch 2.15 attaches its flight recorder to each new group with devices, and
        # the recorder needs a backend in C++.
        return [torch.device("cpu")] if torch_groups.is_known(self) else []

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"{NAME} serves the CPU only, got {device}")
        return self

    @property
    def monitor(self) -> Monitor:
        """The monitor of the other processes."""
        return self._monitor

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the limit of one wait."""
        self.timeout = timeout

    def finish(self) -> None:
        """Wait until the collectives under way have ended, within the group's limit: other ranks may need them."""
        if not self._is_closed:
            with contextlib.suppress(Exception):  # their own waits raise it
                self._backend.finish()

    def shutdown(self) -> None:
        """Wait for the collectives under way, as gloo does, and release the memory. Messages under way never end."""
        try:
            self.finish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Release the memory at once. Operations under way never end."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    def abort(self) -> None:
        """Shut down, and make ranks that wait for this one raise."""
        if not self._is_closed:
            self._is_closed = True  # before the report: a thread that waits here hears that the group is closed
            self._monitor.give_up(RemoteError(f"rank {self.rank()} has aborted the group {self._group_name!r}"))
            self._close()

    def _close(self) -> None:
        self._monitor.end()
        self._monitor.announce_leaving()
        self._backend.close()

    def renew(self, store: Store) -> None:
        """Reconnect the ranks after failed operations. All ranks call it together, with no operation under way.

        The group remains the same object, so its users (DDP, a mesh) continue to work.

        Args:
            store: A new store in which all ranks meet.

        Raises:
            EasydistError: Some ranks did not come, as for a new group.
        """
        if self.size() == 1:
            return
        self.discard()
        rendezvous, self._backend = met(store, self.rank(), self.size(), self.timeout)
        self._store, self._monitor = rendezvous.store, rendezvous.monitor
        rendezvous.look_to(self.guard)
        self._compare()
        self._under_way, self._is_closed, self._batch = [], False, None
        self._held.clear()

    # Operations. ``opts: Any``: torch has a class of its own for each of them.

    @overloaded(2, 1)
    def allgather(self, output_tensors: Sequence[TensorList], input_tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set ``output_tensors[0][r] = input_tensors[0] of rank r``. The ranks' sizes may differ."""
        (outputs,), (tensor,) = output_tensors, input_tensors
        self._demand_one_per_rank("all_gather", outputs, tensor)
        targets, data = [Filled(output) for output in outputs], dense(tensor)
        gather = lambda: [self._backend.all_gather_v(all_bytes(targets), as_bytes(data))]  # noqa: E731
        return self._begin("all_gather", (data, None, None), gather, targets)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        """Set ``output = cat([input of rank 0, …])``, or their stack."""
        if not _fit(output, input, self.size()):
            raise ValueError(f"all_gather_single: {self.size()} times {seen(input)} do not fit {seen(output)}")
        target, data = Filled(output), dense(input)
        flat = as_bytes(target.dense)
        gather = lambda: [self._backend.all_gather_single(flat, as_bytes(data))]  # noqa: E731
        return limited(self._begin("all_gather_single", (data, None, None), gather, [target]), opts)

    def all_gather_single_coalesced(self, outputs: TensorList, inputs: TensorList, opts: Any = None) -> GroupWork:
        """Call ``all_gather_single`` for several tensors."""
        return self._all([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def allgather_coalesced(
        self, output_lists: Sequence[TensorList], input_list: TensorList, opts: Any = None
    ) -> GroupWork:
        """Set ``output_lists[r][i] = input_list[i] of rank r``."""
        outputs = zip(*output_lists, strict=True)
        return self._all([self.allgather([list(o)], [i], opts) for o, i in zip(outputs, input_list, strict=True)])

    @overloaded(1)
    def allreduce(self, tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set in place ``tensor = op(tensor of rank 0, …)`` for each of the tensors; sparse ones are added up."""
        op = reduction("all_reduce", opts, tensors)
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._all([self._add_up(tensor, op) for tensor in tensors])
        targets = [Filled(tensor, filled=True) for tensor in tensors]
        return self._each("all_reduce", targets, functools.partial(self._reduce, op), None, op)

    allreduce_coalesced = allreduce

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Exchange parts of dim 0: the s-th of ``output`` is the part of rank s's ``input`` for this rank."""
        target, data = Filled(output), dense(input)
        outputs = self._parts("output", target.dense, output_split_sizes)
        inputs = self._parts("input", data, input_split_sizes)
        return limited(self._swap("all_to_all_single", outputs, inputs, [target]), timeout or opts)

    @overloaded(1, 1)
    def alltoall(self, output_tensors: TensorList, input_tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set ``output_tensors[s] = input_tensors[rank] of rank s``. The sizes may differ."""
        targets = [Filled(output) for output in output_tensors]
        return self._swap("all_to_all", [t.dense for t in targets], [dense(i) for i in input_tensors], targets)

    @overloaded()
    def barrier(self, opts: Any = None) -> GroupWork:
        """Block until every rank has begun it."""
        return self._begin("barrier", _NOTHING, lambda: [self._backend.barrier()], [])

    @overloaded(1)
    def broadcast(self, tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set in place ``tensor = tensor of the root``."""
        root = self._root("broadcast", opts)
        targets = [Filled(tensor, filled=True) for tensor in tensors]
        return self._each("broadcast", targets, lambda flat: [self._backend.broadcast(as_bytes(flat), root)], root)

    @overloaded(2, 1)
    def gather(self, output_tensors: Sequence[TensorList], input_tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set on the root ``output_tensors[0][r] = input_tensors[0] of rank r``."""
        (tensor,), root = input_tensors, self._root("gather", opts)
        outputs = output_tensors[0] if root == self.rank() else []
        if root == self.rank():
            self._demand_one_per_rank("gather", outputs, tensor)
        targets, data = [Filled(output) for output in outputs], dense(tensor)
        gather = lambda: [self._backend.gather(all_bytes(targets), as_bytes(data), root)]  # noqa: E731
        return self._begin("gather", (data, root, None), gather, targets)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        """Set on the root ``output = cat([input of rank 0, …])``, or their stack; torch 2.14 and newer call it."""
        root, data = self._root("gather_single", opts), dense(input)
        if root == self.rank() and not _fit(output, input, self.size()):
            raise ValueError(f"gather_single: {self.size()} times {seen(input)} do not fit {seen(output)}")
        targets = [Filled(output)] if root == self.rank() else []
        flats = [part for one in targets for part in as_bytes(one.dense).view(self.size(), data.nbytes)]
        gather = lambda: [self._backend.gather(flats, as_bytes(data), root)]  # noqa: E731
        return limited(self._begin("gather_single", (data, root, None), gather, targets), opts)

    # Arguments are named as in torch, since callers may name them.
    def recv(self, tensors: TensorList, srcRank: int, tag: int) -> GroupWork:  # noqa: N803
        """Receive the tensors that ``srcRank`` sends to this rank with this tag, in order."""
        self._demand_message("recv", srcRank, tag)
        targets = [Filled(tensor) for tensor in tensors]
        flats = [target.dense.view(-1) for target in targets]
        receive = self._tagged(self._backend.recv, tag)
        return self._begin("recv", _NOTHING, lambda: [receive(flat, srcRank) for flat in flats], targets)

    def recv_anysource(self, tensors: TensorList, tag: int) -> GroupWork:
        """Receive the next tensor that any rank sends to this one with this tag, unless a ``recv`` waits for it.

        The wait is over with an error once no other rank is left that could send.
        """
        if self.size() == 1:
            raise ValueError("recv: a group of one rank has no sender")
        self._demand_message("recv", 1 - min(1, self.rank()), tag)
        target, begun = Filled(tensors[0]), list[tuple[Begun, Sequence[int]]]()
        backend: Any = self._backend

        def receive() -> Sequence[Begun]:
            begun.append(backend.recv_any(target.dense.view(-1), tag, self._senders))
            return [begun[0][0]]

        work = self._begin("recv", _NOTHING, receive, [target])
        work.sources = begun[0][1]
        return work

    def _senders(self) -> list[int]:
        """Return the other ranks that may still send; all of them if none may."""
        peers = self._monitor.peers
        return [rank for rank, peer in peers.items() if not (peer.has_ended() or peer.has_left())] or [*peers]

    @overloaded(1)
    def reduce(self, tensors: TensorList, opts: Any = None) -> GroupWork:
        """Set on the root, in place, ``tensor = op(tensor of rank 0, …)``. The other ranks' tensors do not change."""
        op, root = reduction("reduce", opts, tensors), self._root("reduce", opts)
        is_root = root == self.rank()
        targets = [Filled(t, filled=True) if is_root else Filled(dense(t).clone(), filled=True) for t in tensors]
        return self._each("reduce", targets, functools.partial(self._reduce, op), root, op)

    @overloaded(1, 2)
    def reduce_scatter(
        self, output_tensors: TensorList, input_tensors: Sequence[TensorList], opts: Any = None
    ) -> GroupWork:
        """Set ``output_tensors[0] = op(input_tensors[0][rank] of rank 0, …)``. The ranks' sizes may differ."""
        (output,), (inputs,) = output_tensors, input_tensors
        return self._reduce_scatter("reduce_scatter", output, inputs, opts)

    def reduce_scatter_single(
        self,
        outputTensor: torch.Tensor,  # noqa: N803
        inputTensor: torch.Tensor,  # noqa: N803
        opts: Any = None,
    ) -> GroupWork:
        """Set ``outputTensor = op(part of rank 0's inputTensor, …)``, which has one equal part for each rank."""
        output, input = outputTensor, inputTensor
        if not _fit(input, output, self.size()):
            raise ValueError(f"reduce_scatter_single: {self.size()} times {seen(output)} is not {seen(input)}")
        parts = dense(input).reshape(self.size(), output.numel()).unbind()
        return limited(self._reduce_scatter("reduce_scatter_single", output, parts, opts), opts)

    def reduce_scatter_single_coalesced(self, outputs: TensorList, inputs: TensorList, opts: Any = None) -> GroupWork:
        """Call ``reduce_scatter_single`` for several tensors."""
        return self._all([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    @overloaded(1, 2)
    def scatter(self, output_tensors: TensorList, input_tensors: Sequence[TensorList], opts: Any = None) -> GroupWork:
        """Set ``output_tensors[0] = input_tensors[0][rank] of the root``."""
        (output,), root = output_tensors, self._root("scatter", opts)
        inputs = input_tensors[0] if root == self.rank() else []
        if root == self.rank():
            self._demand_one_per_rank("scatter", inputs, output)
        target, data = Filled(output), [dense(tensor) for tensor in inputs]
        flat, flats = as_bytes(target.dense), [as_bytes(tensor) for tensor in data]
        about = target.dense, root, None
        return self._begin("scatter", about, lambda: [self._backend.scatter(flat, flats, root)], [target])

    def send(self, tensors: TensorList, dstRank: int, tag: int) -> GroupWork:  # noqa: N803
        """Send to ``dstRank``, which receives as many bytes with this tag. Change the tensors after the work's end."""
        self._demand_message("send", dstRank, tag)
        data, send = [dense(tensor) for tensor in tensors], self._tagged(self._backend.send, tag)
        return self._begin("send", _NOTHING, lambda: [send(t.view(-1), dstRank) for t in data], [])

    # The names in torch 2.12 and older.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        batch, self._batch = self._batch or [], None
        return self._all(batch)

    def _begin(
        self,
        operation: str,
        about: About,
        start: Callable[[], Sequence[Begun]],
        targets: Sequence[Filled],
        before: Callable[[], None] | None = None,
    ) -> GroupWork:
        """Begin an operation.

        Args:
            operation: torch's name for it.
            about: The description by which the ranks compare it.
            start: Starts it in the backend. It refers to all tensors that must live until the end.
            targets: The tensors to fill.
            before: A function to run at the end, before the targets are delivered.
        """

        def finish() -> None:
            if before is not None:
                before()
            for target in targets:
                target.deliver()

        if self.size() > 1:
            forks.demand_own(self._generation)
        modes.demand_data(operation)
        self._let_go()
        self._monitor.begin(operation, site(), NEVER)
        try:
            # A rank that gave up an operation had joined it, so no wait would find it.
            self._monitor.check_reports(even_if_sent=False)
        except BaseException:
            self._monitor.end(is_done=False)
            raise
        self._under_way.append(None)
        try:
            self._backend.call = described(operation, *about, sizes_differ=operation in _UNEVEN)
            with event(operation):
                works = start()
        except BaseException as error:
            self.leave(None if isinstance(error, Exception) else error)  # after Ctrl-C the others may have joined it
            raise
        finally:
            self._backend.call = OWN
        work = GroupWork(operation, works, [target.tensor for target in targets], self, finish, start)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _all(
        self,
        works: Sequence[GroupWork],
        tensors: TensorList | None = None,
        finish: Callable[[], None] | None = None,
    ) -> GroupWork:
        """Combine several works into one, which counts as another work of the group; by default with their result."""
        self._under_way.append(None)
        result = [tensor for work in works for tensor in work.tensors] if tensors is None else tensors
        combined = GroupWork(works[0].operation if works else "", works, result, self, finish)
        if self._batch is not None:  # torch drops this work, and waits for the batch
            self._batch = [one for one in self._batch if one not in works] + [combined]
        return combined

    def _let_go(self) -> None:
        """Release works that have ended. If there are too many, check whether the oldest have ended."""
        for work in [work for work in self._held if work.is_done]:
            self._held.remove(work)
        while len(self._held) > _MOST_HELD and self._held[0].is_completed():
            self._held.pop(0)

    def _each(
        self,
        operation: str,
        targets: Sequence[Filled],
        move: Callable[[torch.Tensor], Sequence[Begun]],
        root: int | None = None,
        op: ReduceOp | None = None,
    ) -> GroupWork:
        """Begin an operation for each tensor: the ranks compare every one of them."""
        starts = [functools.partial(move, target.dense.view(-1)) for target in targets]
        works = [
            self._begin(operation, (t.dense, root, op), start, [t]) for t, start in zip(targets, starts, strict=True)
        ]
        return works[0] if len(works) == 1 else self._all(works)

    def _reduce(self, op: ReduceOp, flat: torch.Tensor) -> Sequence[Begun]:
        if op.is_scaled:
            return [self._backend.all_reduce_from(flat, op.scaled(flat), ReduceOp.SUM)]
        return [self._backend.all_reduce(flat, op)]

    def _add_up(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        works, write = add_up(tensor, op, self.size(), self.all_gather_single, self.allgather)
        return self._all(works, [tensor], write)

    def _swap(self, operation: str, outputs: TensorList, inputs: TensorList, targets: Sequence[Filled]) -> GroupWork:
        mine = self.rank()
        self._demand_one_per_rank(operation, inputs, outputs[mine] if len(outputs) > mine else None)
        self._demand_one_per_rank(operation, outputs, inputs[mine])
        flats = [as_bytes(output) for output in outputs], [as_bytes(tensor) for tensor in inputs]
        about = inputs[mine], None, None
        return self._begin(operation, about, lambda: [self._backend.all_to_all_v(*flats)], targets)

    def _reduce_scatter(self, operation: str, output: torch.Tensor, inputs: TensorList, opts: Any) -> GroupWork:
        op = reduction(operation, opts, [output])
        self._demand_one_per_rank(operation, inputs, output)
        target, data = Filled(output), [op.scaled(dense(tensor)) for tensor in inputs]
        parts = torch.empty((self.size(), output.numel()), dtype=output.dtype, device="cpu")
        flats = [as_bytes(part) for part in parts], [as_bytes(tensor) for tensor in data]

        def reduce() -> None:
            combine_into(target.dense.view(-1), op.unscaled, parts.unbind())

        about = (output, None, op)
        return self._begin(operation, about, lambda: [self._backend.all_to_all_v(*flats)], [target], reduce)

    def _parts(self, what: str, tensor: torch.Tensor, sizes: Sequence[int]) -> TensorList:
        length = len(tensor)
        if not sizes and length % self.size() == 0:
            sizes = [length // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != length:
            raise ValueError(f"all_to_all_single: {what} of {length} rows cannot be split as {list(sizes)}")
        parts: TensorList = tensor.split(list(sizes))
        return parts

    def _demand_one_per_rank(self, operation: str, tensors: TensorList, own: torch.Tensor | None) -> None:
        """Make sure that there is one tensor per rank, and that this rank's fits its counterpart."""
        if len(tensors) != self.size():
            raise ValueError(f"{operation}: needs {self.size()} tensors, one per rank, got {len(tensors)}")
        if own is None or not _fit(tensors[self.rank()], own):
            has, needs = seen(tensors[self.rank()]), "nothing" if own is None else seen(own)
            raise ValueError(f"{operation}: the tensor of this rank, {has}, does not fit its counterpart, {needs}")

    def _root(self, operation: str, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self.size():
            raise ValueError(f"{operation}: a group of {self.size()} ranks has no rank {root}")
        return root

    def _demand_message(self, operation: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size() or peer == self.rank():
            raise ValueError(
                f"{operation}: rank {self.rank()} of {self.size()} cannot exchange messages with rank {peer}"
            )
        if not 0 <= tag < TAGS:
            raise ValueError(f"{operation}: {NAME} has tags from 0 to {TAGS - 1}, got {tag}")

    def _tagged(self, begin: Callable[..., Begun], tag: int) -> Callable[..., Begun]:
        return functools.partial(begin, tag=tag) if tag else begin

    # For this module: the ends of works and waits.

    def hold(self, work: GroupWork) -> None:
        """Keep a work until the operation after its end. A waiter in C++ has its result by then."""
        self._held.append(work)

    def leave(self, error: BaseException | None) -> None:
        """Record the end of an operation, with its error if it has failed."""
        monitor = self._monitor
        if self._under_way:  # not if the group has been renewed since
            self._under_way.pop()
        if isinstance(error, DisagreementError):  # all ranks raise it, and go on
            error.is_told, error = True, None
        if isinstance(error, EasydistError):
            monitor.give_up(error)
        elif error is not None and not isinstance(error, Exception):
            monitor.interrupted(error)
        if not self._under_way:  # also after an error: a body that follows waits for nobody in this group
            monitor.end(error is None and monitor.broken is None)

    def guard(self, awaited: Sequence[int], waited: float) -> None:
        """End a wait that cannot succeed.

        Args:
            awaited: The ranks that have not come yet.
            waited: The seconds so far.

        Raises:
            PeerLostError: One of them has ended.
            RemoteError: One of them was interrupted, or has aborted the group.
            CollectiveTimeout: The time limit has passed.
        """
        if self._is_closed:  # in another thread: the wait ends by that
            return
        self._monitor.guard(awaited, waited)
        if waited >= self.timeout.total_seconds():
            late = self._monitor.late(awaited, waited)
            late.args = (f"{late}\nThe timeout of the group, {self.timeout.total_seconds():g} s, is over.",)
            self._monitor.give_up(late)
            self._monitor.raise_if_broken()


def _fit(whole: torch.Tensor, part: torch.Tensor, count: int = 1) -> bool:
    """True if one tensor holds as much as several of another; bytes of another dtype would be other values."""
    return whole.dtype == part.dtype and whole.nbytes == count * part.nbytes
