"""Every entry of easydist that takes a leaf, called on two ranks: ``ENTRIES[name](env, leaf, twin)``.

``twin`` is a plain tensor of the leaf's dtype and shape. Entries return what arrived.
"""

import functools
import operator
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launching import within

import easydist
from easydist import weights
from easydist.base import modes
from easydist.comms import ReduceOp, new_comm, objcol
from easydist.metrics import Counts, Sums, WeightedMean, compute
from easydist.parallel import GroupCoordinator
from easydist.queue import MessageQueue

CPU, SUM = torch.device("cpu"), ReduceOp.SUM
ones = functools.partial(torch.ones, dtype=torch.float32, device=CPU)  # whatever the defaults are
ENTRIES, IN_PLACE, ALONE = {}, set(), set()


def entry(function=None, *, in_place=False, alone=True):
    """Register an entry.

    Args:
        function: The entry.
        in_place: True if it writes into the leaf.
        alone: True if it may be called with the leaf on one rank and a plain tensor on the other: all ranks hear of it.
    """
    if function is None:
        return functools.partial(entry, in_place=in_place, alone=alone)
    name = function.__name__.replace("_", " ")
    ENTRIES[name] = function
    if in_place:
        IN_PLACE.add(name)
    if alone:
        ALONE.add(name)
    return function


def entries(prefix, names, make, **options):
    for name in names:
        function = functools.partial(make, name)
        function.__name__ = f"{prefix} {name}".strip()
        entry(function, **options)


def like(leaf):
    """Return a plain tensor of the leaf's shape and dtype, as far as it has them."""
    try:
        return ones(tuple(leaf.shape), dtype=torch.int8 if leaf.is_quantized else leaf.dtype)
    except (RuntimeError, ValueError, TypeError):
        return ones(4, 6)


class Env:
    """The communicators of one rank, made when they are first used: by both ranks in the same entry."""

    def __init__(self, rank, world_size=2):
        self.rank, self.size, self.peer = rank, world_size, 1 - rank
        self.folder = Path(tempfile.mkdtemp())

    def comm(self, backend):
        return self._comms[backend]

    @functools.cached_property
    def _comms(self):
        limit = timedelta(seconds=within(20))
        return {name: new_comm(name, CPU, f"comm of {name}", timeout=limit) for name in ("shm", "gloo")}

    @functools.cached_property
    def group(self):
        import easydist.process_group  # noqa: F401

        return dist.new_group(backend="easydist_shm")

    @functools.cached_property
    def coordinator(self):
        return GroupCoordinator([[0, 1]], self.rank, "gloo", False)

    @functools.cached_property
    def queue(self):
        return MessageQueue.create_from_process_group(None, 1 << 18, 10, writer_rank=0)

    @functools.cached_property
    def window(self):
        return self.comm("shm").window_allocate(1 << 20)

    def make_all(self):
        """Make everything now, outside of torch's modes."""
        return self._comms, self.group, self.coordinator, self.queue, self.window

    def works(self):
        """Make sure that everything made so far still works on both ranks."""
        assert easydist.gather(self.rank).tolist() == [0, 1]
        for comm in self.__dict__.get("_comms", {}).values():
            comm.all_reduce(two := ones(2), SUM, False)
            assert two.tolist() == [2, 2]
        if "group" in self.__dict__:
            dist.all_reduce(two := ones(2), group=self.group)
            assert two.tolist() == [2, 2]
        if "coordinator" in self.__dict__:
            assert self.coordinator.all_reduce(ones(2)).tolist() == [2, 2]
        if "queue" in self.__dict__:
            assert self.queue.broadcast_object("here" if self.rank == 0 else None) == "here"


VERBS = {
    "gather": lambda env, x: easydist.gather({"x": x}),
    "gather along dim 1": lambda env, x: easydist.gather({"x": x}, dim=1),
    "gather to one": lambda env, x: easydist.gather({"x": x, "y": ones(3)}, dst=0),
    "gather as list": lambda env, x: easydist.gather([x], as_list=True),
    "gather of equal leaves": lambda env, x: easydist.gather([x, x, {"x": x}]),
    "gather without check": lambda env, x: easydist.gather({"x": x}, check=False),
    "reduce sum": lambda env, x: easydist.reduce({"x": x}, "sum"),
    "reduce mean": lambda env, x: easydist.reduce([x, ones(2)], "mean", 0.5),
    "reduce max": lambda env, x: easydist.reduce(x, "max"),
    "reduce none": lambda env, x: easydist.reduce({"x": x}, "none"),
    "scatter": lambda env, x: easydist.scatter({"x": x}),
    "scatter from 1": lambda env, x: easydist.scatter({"x": x} if env.rank else None, 1),
    "all to all": lambda env, x: easydist.all_to_all({"x": x}),
    "pad": lambda env, x: easydist.pad_across_processes({"x": x, "y": ones(1 + env.rank)}),
    "copy to devices": lambda env, x: easydist.copy_tensor_to_devices({"x": x} if env.rank else None),
    "broadcast to none": lambda env, x: easydist.broadcast({"x": x} if env.rank else None, 1),
    "gather object": lambda env, x: easydist.gather_object([{"x": x}]),
    "gather object safely": lambda env, x: easydist.gather_object(x, weights_only=True),
    "broadcast object list": lambda env, x: easydist.broadcast_object_list([x, 5], 1),
    "scatter object list": lambda env, x: (got := [None], easydist.scatter_object_list(got, [x, {"x": x}], 1))[0],
    "broadcast tensor dict": lambda env, x: easydist.broadcast_tensor_dict({"x": x} if env.rank else None, 1),
    "gather for metrics": lambda env, x: easydist.gather_for_metrics({"x": x}, indices=_rows(env, x)),
    "gather for metrics of lists": lambda env, x: easydist.gather_for_metrics(
        [x, 5], indices=[2 * env.rank, 2 * env.rank + 1], ragged=True
    ),
    "gather for metrics of objects": lambda env, x: easydist.gather_for_metrics([x], True, indices=[env.rank]),
    "collector": lambda env, x: _collected(x=x, env=env),
    "collector of items": lambda env, x: _collected(x=[x, x], env=env),
    "sums": lambda env, x: compute(_updated(Sums(), loss=x)),
    "weighted mean": lambda env, x: compute(_updated(WeightedMean(), value=x, weight=x)),
    "counts": lambda env, x: compute(_updated(Counts(), keys=x)),
    "state dict": lambda env, x: weights.broadcast_state_dict({"x": x} if env.rank else None, 1),
    "state dict as half": lambda env, x: weights.broadcast_state_dict(
        {"x": x, "y": ones(3)} if env.rank else {}, 1, dtype=torch.float16
    ),
    "published": lambda env, x: _published(env, x),
    "streamed": lambda env, x: _published(env, x, streams=True),
    "resharding": lambda env, x: _resharded(env, {"x": x}),
}
entries("", VERBS, lambda name, env, leaf, twin: VERBS[name](env, leaf))
ALONE -= {"scatter", "gather without check", "published"}


def _rows(env, x):
    count = _size(x)
    return torch.arange(count, device=CPU) + env.rank * count


def _size(x):
    try:
        return len(x)
    except (RuntimeError, TypeError, ValueError):  # some leaves have no size
        return 4


def _updated(metric, **values):
    with easydist.together():
        metric.update(**values)
    return metric


def _collected(env, **columns):
    collector = easydist.MetricCollector()
    with easydist.together():
        collector.update(_rows(env, columns["x"]), **columns)
    return collector.compute()


def _published(env, x, streams=False):
    if env.rank == 0:
        sender = weights.WeightPublisher({"x": x})
        return sender.publish()
    receiver = weights.WeightReceiver()
    if streams:
        return dict(receiver.stream())
    receiver.receive()
    return receiver.weights()


def _resharded(env, source):
    whole = {"x": like(source["x"])}
    weights.Resharding(source if env.rank else None, None if env.rank else whole).run()
    return whole


@entry
def pad_to_the_longer(env, leaf, twin):
    return easydist.pad_across_processes({"x": leaf if env.rank else torch.cat([twin, twin])}, pad_index=0)


TARGETS = {
    "broadcast into": lambda env, x, y: easydist.broadcast({"x": x if env.rank else y}),
    "broadcast into two": lambda env, x, y: easydist.broadcast([x, ones(2)] if env.rank else [y, ones(2)]),
    "state dict into": lambda env, x, y: weights.broadcast_state_dict({"x": x if env.rank else y}),
    "resharding into": lambda env, x, y: weights.Resharding(*(({"x": y}, None), (None, {"x": x}))[env.rank]).run(),
    "tensor dict into": lambda env, x, y: (
        easydist.recv_tensor_dict(0, into={"x": x}) if env.rank else easydist.send_tensor_dict({"x": y}, 1)
    ),
    "broadcast tensor dict into": lambda env, x, y: (
        easydist.broadcast_tensor_dict(None, into={"x": x}) if env.rank else easydist.broadcast_tensor_dict({"x": y})
    ),
    "coordinator broadcast into": lambda env, x, y: env.coordinator.broadcast(x if env.rank else y),
    "gathered parameters": lambda env, x, y: _whole(env, x, y),
    "load into": lambda env, x, y: _loaded(env, {"x": y}, {"x": x}),
}


def _whole(env, x, y):
    with easydist.GatheredParameters([x if env.rank else y], modifier_rank=0):
        pass


def _loaded(env, data, into):
    easydist.save(data, env.folder / "source")
    return easydist.load(env.folder / "source", into=into)


def _into(name, env, leaf, twin):
    result = TARGETS[name](env, leaf, twin)
    return result, (leaf if env.rank else twin)


entries("", TARGETS, _into, in_place=True)
ALONE -= {"coordinator broadcast into", "gathered parameters", "load into"}

MESSAGES = {
    "send tensor dict": lambda env, x: (
        easydist.recv_tensor_dict(0) if env.rank else easydist.send_tensor_dict({"x": x}, 1)
    ),
    "coordinator send": lambda env, x: (
        env.coordinator.recv(x.shape, x.dtype, 0) if env.rank else env.coordinator.send(x, 1)
    ),
    "coordinator send tree": lambda env, x: (
        env.coordinator.recv_tensor_dict(0) if env.rank else env.coordinator.send_tensor_dict({"x": x, "n": 5}, 1)
    ),
    "coordinator send object": lambda env, x: (
        env.coordinator.recv_object(0) if env.rank else env.coordinator.send_object([x], 1)
    ),
    "coordinator all reduce": lambda env, x: env.coordinator.all_reduce(x),
    "coordinator all gather": lambda env, x: env.coordinator.all_gather(x),
    "coordinator all gatherv": lambda env, x: env.coordinator.all_gatherv([x, x]),
    "coordinator reduce scatter": lambda env, x: env.coordinator.reduce_scatter(x, 0),
    "coordinator gather": lambda env, x: env.coordinator.gather(x),
    "coordinator broadcast object": lambda env, x: env.coordinator.broadcast_object(x),
    "coordinator broadcast tensor dict": lambda env, x: env.coordinator.broadcast_tensor_dict(
        {"x": x} if env.rank == 0 else None
    ),
    "queue": lambda env, x: _queued(env, x),
    "queue of dict": lambda env, x: _queued(env, {"x": x, "y": ones(3)}),
}
entries("", MESSAGES, lambda name, env, leaf, twin: MESSAGES[name](env, leaf), alone=False)


def _queued(env, value):
    """A writer that raises has written nothing; then it writes the text of its error, outside of any mode."""
    try:
        if not env.rank:
            env.queue.enqueue(value, within(10))
            return None
        got = env.queue.dequeue(within(10))
    except (TypeError, ValueError, RuntimeError, easydist.EasydistError) as error:
        with modes.left():
            if not env.rank:
                env.queue.enqueue(f"the writer raised {type(error).__name__}", within(10))
            elif where_is_no_data(error):
                env.queue.dequeue(within(10))
        raise
    if isinstance(got, str):
        raise TypeError(got)
    return got


def where_is_no_data(error):
    return "called under" in str(error) or "called inside" in str(error)


LOCAL = {
    "save": lambda env, x: (easydist.save({"x": x}, path := env.folder / "file"), easydist.load(path))[1],
    "send to device": lambda env, x: easydist.send_to_device({"x": x}, "cpu"),
    "structure": lambda env, x: str(easydist.get_data_structure({"x": x})),
    "concatenate": lambda env, x: easydist.concatenate([{"x": x}, {"x": x}]),
    "listify": lambda env, x: easydist.listify({"x": x}),
    "slice": lambda env, x: easydist.slice_tensors({"x": x}, slice(0, 2)),
}
entries("", LOCAL, lambda name, env, leaf, twin: LOCAL[name](env, leaf), alone=False)

COMM = {
    "all reduce": lambda c, x, y, r: (c.all_reduce(x, SUM, False), x)[1],
    "all reduce average": lambda c, x, y, r: (c.all_reduce(x, ReduceOp.AVG, False), x)[1],
    "all reduce later": lambda c, x, y, r: (c.all_reduce(x, SUM, True).wait(), x)[1],
    "broadcast": lambda c, x, y, r: (c.broadcast(x, 0, False), x)[1],
    "reduce": lambda c, x, y, r: (c.reduce(x, 0, SUM, False), x)[1],
    "all gather into": lambda c, x, y, r: (c.all_gather([x, y] if r else [y, x], y, False), x)[1],
    "scatter into": lambda c, x, y, r: (c.scatter(x, [y, y] if r == 0 else [], 0, False), x)[1],
    "all to all into": lambda c, x, y, r: (c.all_to_all([y, x], [y.clone(), y.clone()], False), x)[1],
    "reduce scatter into": lambda c, x, y, r: (c.reduce_scatter(x, [y, y], SUM, False), x)[1],
    "receive": lambda c, x, y, r: (c.recv(x, 0, False) if r else c.send(y, 1, False), x)[1],
}
COMM_INPUTS = {
    "all gather": lambda c, x, y, r: _filled(c.all_gather, y, 2, x, False),
    "all gather of parts": lambda c, x, y, r: (
        o := torch.stack([y, y]),
        c.core().all_gather_parts([o], [x], [None], False),
    )[0],
    "all gather single": lambda c, x, y, r: (o := torch.stack([y, y]), c.all_gather_single(o, x, False))[0],
    "gather": lambda c, x, y, r: _filled(c.gather, y, 2 * (r == 0), x, 0, False),
    "scatter": lambda c, x, y, r: (o := torch.zeros_like(y), c.scatter(o, [x, x] if r == 0 else [], 0, False))[0],
    "all to all": lambda c, x, y, r: _filled(c.all_to_all, y, 2, [x, x], False),
    "reduce scatter": lambda c, x, y, r: (o := torch.zeros_like(y), c.reduce_scatter(o, [x, x], SUM, False))[0],
    "reduce scatter single": lambda c, x, y, r: (
        o := y[: len(y) // 2].clone(),
        c.reduce_scatter_single(o, x, SUM, False),
    )[0],
    "send": lambda c, x, y, r: (o := torch.zeros_like(y), c.recv(o, 0, False) if r else c.send(x, 1, False))[0],
    "batch": lambda c, x, y, r: _batched(c, x, y, r),
    "objects": lambda c, x, y, r: (o := [None] * 2, objcol.all_gather_object(c, o, x))[0],
}


def _filled(call, like, count, *args):
    outputs = [like.clone() for _ in range(count)]
    call(outputs, *args)
    return outputs


def _batched(comm, x, y, rank):
    batch, output = comm.batch_op_create(), y.clone()
    batch.send(x, 1 - rank)
    batch.recv(output, 1 - rank)
    batch.issue(False)
    return output


def over(where, prefix, table, **options):
    """Register the calls of one communicator, which one rank may refuse while the other waits for its data.

    Such a rank then makes the call with the twin.
    """

    def called(name, env, leaf, twin):
        try:
            return table[name](where(env), leaf, twin, env.rank)
        except (TypeError, ValueError, RuntimeError):
            if leaf is not twin and not modes.without_data():
                table[name](where(env), twin, twin, env.rank)
            raise

    entries(prefix, table, called, alone=False, **options)


for backend in ("shm", "gloo"):
    over(operator.methodcaller("comm", backend), f"{backend} comm", COMM, in_place=True)
    over(operator.methodcaller("comm", backend), f"{backend} comm", COMM_INPUTS)


@entry(alone=False)
def window_put(env, leaf, twin):
    env.window.put(leaf, env.rank, 0, False)
    return env.window.get_tensor(env.rank, tuple(twin.shape), twin.dtype, 0).clone()


@entry(in_place=True, alone=False)
def window_of_a_tensor(env, leaf, twin):
    window = env.comm("shm").new_window()
    window.tensor_register(leaf)
    got = window.map_remote_tensor(env.peer).clone()
    window.tensor_deregister()
    return got


DIST = {
    "all reduce": lambda g, x, y, r: (dist.all_reduce(x, group=g), x)[1],
    "broadcast": lambda g, x, y, r: (dist.broadcast(x, group_src=0, group=g), x)[1],
    "reduce": lambda g, x, y, r: (dist.reduce(x, group_dst=0, group=g), x)[1],
    "all gather into": lambda g, x, y, r: (dist.all_gather([x, y] if r else [y, x], y, group=g), x)[1],
    "scatter into": lambda g, x, y, r: (dist.scatter(x, None if r else [y, y], group_src=0, group=g), x)[1],
    "receive": lambda g, x, y, r: (dist.recv(x, group_src=0, group=g) if r else dist.send(y, group_dst=1, group=g), x)[
        1
    ],
}
DIST_INPUTS = {
    "all gather": lambda g, x, y, r: _filled(dist.all_gather, y, 2, x, g),
    "gather": lambda g, x, y, r: (o := None if r else [y.clone(), y.clone()], dist.gather(x, o, group_dst=0, group=g))[
        0
    ],
    "scatter": lambda g, x, y, r: (o := y.clone(), dist.scatter(o, None if r else [x, x], group_src=0, group=g))[0],
    "all to all": lambda g, x, y, r: _filled(dist.all_to_all, y, 2, [x, x], g),
    "all to all single": lambda g, x, y, r: (o := y.clone(), dist.all_to_all_single(o, x, group=g))[0],
    "reduce scatter": lambda g, x, y, r: (o := y.clone(), dist.reduce_scatter(o, [x, x], group=g))[0],
    "send": lambda g, x, y, r: (
        o := torch.zeros_like(y),
        dist.recv(o, group_src=0, group=g) if r else dist.send(x, group_dst=1, group=g),
    )[0],
}
over(operator.attrgetter("group"), "dist", DIST, in_place=True)
over(operator.attrgetter("group"), "dist", DIST_INPUTS)
