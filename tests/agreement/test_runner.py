"""One runner for every verb: a rank that fails alone is never waited for until the time is over."""

import contextlib
import functools
import gc
import warnings
import weakref

import psutil
import pytest
import torch
import torch.distributed as dist
from groups import BACKENDS, check_works, made, of_all, short_rows
from launching import sampled, within

import easydist
from easydist import CollectiveTimeout, RemoteError
from easydist.agreement.runner import Verb, run
from easydist.messages.pair import Pair
from easydist.metrics import Counts, compute
from easydist.parallel.collectives import AllGather, AllGatherV, AllReduce, ReduceScatter
from easydist.state import communicators
from easydist.testing import distributed
from easydist.verbs import padding

assert [getattr(easydist, name) for name in dir(easydist)]  # loads all verbs
LARGE = torch.ones(300_000)
RAGGED = [torch.ones(1 + i % 3) for i in range(6000)]


def pad(group):
    longer = {"x": torch.ones(2 + group.rank()), "rest": RAGGED}  # too many sizes for the headers
    return easydist.pad_across_processes(longer, group=group, timeout=30)


def scatter_objects(group):
    easydist.scatter_object_list([None], [LARGE] * group.size(), group=group, timeout=30)


def counted(group):
    counts = Counts()
    counts.update(range(80_000))
    return compute(counts, group=group, timeout=30)


@functools.cache
def large_metric():
    """Kept, as a metric alone is a cycle."""
    metric = pytest.importorskip("torchmetrics").CatMetric()
    metric.update(LARGE)
    return metric


def sync(group):
    easydist.metrics.sync_dist(large_metric(), group=group, timeout=30)


def collect(group):
    collector = easydist.MetricCollector(group=group)
    collector.update(range(300), x=LARGE.view(300, 1000))
    return collector.compute()


def reshard(group):
    is_source = group.rank() == 0
    easydist.weights.Resharding(
        {"x": LARGE} if is_source else None, {"x": torch.zeros_like(LARGE)}, group=group, timeout=30
    ).run(timeout=30)


def regroup(group):
    weights = easydist.weights
    member = weights.WeightReceiver(group=group) if group.rank() else weights.WeightPublisher({"x": LARGE}, group=group)
    member.regroup(group)


def backward(group):
    rows = LARGE.clone().requires_grad_()
    easydist.gather(rows, group=group, timeout=30, differentiable=True).sum().backward()
    return rows.grad


VERBS = {
    "gather": lambda group: easydist.gather(LARGE, group=group, timeout=30),
    "backward of gather": backward,
    "gather_for_metrics": lambda group: easydist.gather_for_metrics(
        LARGE, indices=range(len(LARGE)), group=group, timeout=30
    ),
    "MetricCollector": collect,
    "assert_equal": lambda group: easydist.assert_equal(LARGE, group=group, timeout=30),
    "broadcast": lambda group: easydist.broadcast(LARGE.clone(), group=group, timeout=30),
    "copy_tensor_to_devices": lambda group: easydist.copy_tensor_to_devices(
        None if group.rank() else LARGE, group=group, timeout=30
    ),
    "scatter": lambda group: easydist.scatter(LARGE, group=group, timeout=30),
    "all_to_all": lambda group: easydist.all_to_all(LARGE, group=group, timeout=30),
    "reduce": lambda group: easydist.reduce(LARGE, group=group, timeout=30),
    "pad_across_processes": pad,
    "gather_object": lambda group: easydist.gather_object(LARGE, group=group, timeout=30),
    "broadcast_object_list": lambda group: easydist.broadcast_object_list([LARGE], group=group, timeout=30),
    "scatter_object_list": scatter_objects,
    "broadcast_tensor_dict": lambda group: easydist.broadcast_tensor_dict({"x": LARGE}, group=group, timeout=30),
    "all_reduce": lambda group: run(AllReduce(LARGE), communicators(group), 30),
    "reduce_scatter": lambda group: run(ReduceScatter(LARGE, 0, None, may_differ=False), communicators(group), 30),
    "all_gather": lambda group: run(AllGather(LARGE, None, 0), communicators(group), 30),
    "all_gatherv": lambda group: run(AllGatherV(LARGE, 0, None), communicators(group), 30),
    "sync_dist": sync,
    "synchronize_rng_states": lambda group: easydist.synchronize_rng_states(["torch", "numpy"], group=group),
    "compute": counted,
    "Resharding": reshard,
    "Resharding.run": reshard,
    "regroup": regroup,
}
WITHOUT_DATA = {"GatheredParameters", "GroupCoordinator"}
OF_SEVERAL_CALLS = {"MetricCollector", "Resharding", "Resharding.run"}


OF_THE_CLASS = {"compute": "sync_dist"}
"""Calls of a class that states the operation of another call."""


def every(cls):
    """All classes below a class that state an operation themselves."""
    for sub in cls.__subclasses__():
        yield from every(sub)
        if isinstance(vars(sub).get("operation"), str):
            yield sub


def class_of(operation):
    stated = OF_THE_CLASS.get(operation, operation)
    return next(cls for cls in every(Verb) if cls.operation == stated)


def no_memory(*args, **kwargs):
    raise MemoryError("no memory in the middle")


def outcome(call):
    try:
        call()
    except (MemoryError, easydist.EasydistError) as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


def test_every_verb_is_tested_here():
    for name in easydist.__all__:  # loaded when it is first used
        getattr(easydist, name)
    assert {cls.operation for cls in every(Verb)} == VERBS.keys() - OF_THE_CLASS.keys() | WITHOUT_DATA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "operation"), [("shm", name) for name in VERBS] + sampled([("gloo", name) for name in VERBS], 6)
)
@distributed(world_size=3)
def test_a_rank_that_fails_before_its_data_moves_ends_the_call_for_all(rank, backend, operation):
    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        check_works(group, backend)
        if rank == 1:
            patch.setattr(class_of(operation), "exchange", no_memory)
        found = of_all(outcome(lambda: VERBS[operation](group)))
        patch.undo()
        told = (
            f"RemoteError: {operation}: rank 1 failed during the call\n  rank 1: MemoryError: no memory in the middle\n"
        )
        assert found[1] == "MemoryError: no memory in the middle"
        assert all(text.startswith(told) for text in (found[0], found[2]) if text != "a result")
        check_works(group, backend)


@pytest.mark.slow
@pytest.mark.parametrize("operation", sorted(VERBS.keys() - OF_SEVERAL_CALLS))
@distributed(world_size=2)
def test_a_rank_that_fails_when_all_data_has_moved_raises_alone(rank, operation):
    with made("shm") as group, pytest.MonkeyPatch.context() as patch:
        check_works(group, "shm")
        if rank == 1:
            patch.setattr(class_of(operation), "result", no_memory)
        found = of_all(outcome(lambda: VERBS[operation](group)))
        patch.undo()
        assert found == ["a result", "MemoryError: no memory in the middle"]
        check_works(group, "shm")


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_a_rank_without_memory_for_the_sizes_fails_the_padding_of_all(rank, backend):
    with short_rows(backend) as group, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(padding, "sizes_along", no_memory)
        with pytest.raises(MemoryError if rank == 1 else RemoteError, match="no memory in the middle"):
            pad(group)
        patch.undo()
        check_works(group, backend)


@pytest.mark.slow
@distributed(world_size=3)
def test_one_of_two_ranks_that_fails_in_the_middle_is_not_waited_for(rank):
    with made("gloo") as group, pytest.MonkeyPatch.context() as patch:
        check_works(group, "gloo")
        if rank == 1:
            patch.setattr(Pair, "accept", no_memory)
        if rank == 0:
            found = outcome(lambda: easydist.send_tensor_dict({"x": LARGE}, 1, group=group, timeout=30))
            assert found == "a result" or found.startswith("RemoteError: ")
        elif rank == 1:
            assert outcome(lambda: easydist.recv_tensor_dict(0, group=group, timeout=30)).startswith("MemoryError")
        patch.undo()
        check_works(group, "gloo")


@distributed(world_size=2)
def test_what_all_ranks_find_wrong_alike_is_raised_by_each_and_the_next_call_works(rank):
    for _ in range(3):
        with pytest.raises(ValueError, match="exactly one rank has to pass the tensor, but ranks 0, 1 do"):
            easydist.copy_tensor_to_devices(torch.ones(2))
        with pytest.raises(ValueError, match="rank 0 is the source, but its tree is None"):
            easydist.broadcast(torch.ones(2) if rank else None)
        with pytest.raises(ValueError, match="there is no reduction 'total'"):
            easydist.reduce(torch.ones(2), "total")
        assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_a_body_that_raises_the_same_on_all_ranks_raises_its_own_exception(rank):
    with pytest.raises(KeyError, match="missing"), easydist.together():
        raise KeyError("missing")
    with pytest.raises(SystemExit), easydist.together():
        raise SystemExit(3)
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.slow
@distributed(world_size=2)
def test_a_call_leaves_nothing_to_the_garbage_collector(rank):
    with made("shm") as group:
        for call in [*VERBS.values()] * 2:
            call(group)
        gc.collect()
        gc.disable()
        try:
            for operation, call in VERBS.items():
                call(group)
                assert gc.collect() == 0, operation
        finally:
            gc.enable()


FAILING = {
    "the same on all ranks": lambda data, rank: easydist.reduce(data, "total"),
    "a value that cannot be sent": lambda data, rank: easydist.gather_object([data, lambda: None]),
    "no rank of the group": lambda data, rank: easydist.gather(data, dst=17),
    "a rank that is named twice": lambda data, rank: easydist.gather(data, dst=0, group_dst=0),
    "a peer that is named twice": lambda data, rank: easydist.send_object(data, 1, group_dst=1),
    "a disagreement": lambda data, rank: easydist.gather(data[: 1 + rank], dim=rank),
    "a message that does not fit": lambda data, rank: (
        easydist.recv_tensor_dict(0, into={"y": data}) if rank else easydist.send_tensor_dict({"x": data}, 1)
    ),
    "inside of vmap": lambda data, rank: torch.vmap(lambda x: easydist.gather({"x": x, "y": data}))(torch.ones(2)),
}


@pytest.mark.parametrize("name", FAILING)
@distributed(world_size=2)
def test_an_error_keeps_no_data_until_garbage_is_collected(rank, name):
    """The data of a call that has failed may be most of a GPU's memory."""
    data = torch.ones(2)
    gone = weakref.ref(data)
    gc.disable()
    try:
        with contextlib.suppress(TypeError, ValueError, easydist.EasydistError):
            FAILING[name](data, rank)
        del data
        assert gone() is None
    finally:
        gc.enable()


@BACKENDS
@distributed(world_size=2)
def test_a_timeout_keeps_no_data_until_garbage_is_collected(rank, backend):
    data, store = torch.ones(2), dist.group.WORLD.get_group_store()
    gone = weakref.ref(data)
    with made(backend) as group:
        easydist.gather(rank, group=group)
        if rank == 1:
            store.wait(["late"])
            with pytest.raises(CollectiveTimeout):
                easydist.gather(rank, group=group)
        else:
            gc.disable()
            try:
                with contextlib.suppress(CollectiveTimeout):
                    easydist.gather(data, group=group, timeout=0.05)
                del data
                assert gone() is None
            finally:
                gc.enable()
                store.set("late", "")
        assert easydist.gather(rank, group=group).tolist() == [0, 1]


@pytest.mark.slow
@BACKENDS
@distributed(world_size=sampled([2, 4]))
def test_many_gathers_need_no_more_memory_than_one(rank, backend):
    with made(backend) as group:
        leaves = [torch.ones(16 << 10) for _ in range(500)]
        easydist.gather(leaves, group=group)
        gc.disable()
        try:
            before = psutil.Process().memory_info().rss
            for _ in range(10):
                easydist.gather(leaves, group=group)
            grown = psutil.Process().memory_info().rss - before
        finally:
            gc.enable()
        assert grown < 2 * group.size() * 500 * (64 << 10)  # twice the result


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["reduce", "broadcast"])
@BACKENDS
@distributed(world_size=3)
def test_without_the_check_a_rank_that_raises_alone_is_not_waited_for(rank, backend, verb):
    """Its tree cannot be used, and there is no exchange in which the others would hear of that."""
    call = getattr(easydist, verb)
    with made(backend) as group:
        check_works(group, backend)
        data = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
        if rank == 1:
            with pytest.raises(TypeError, match="not a dense tensor"):
                call(data, group=group, check=False)
        else:
            found = outcome(lambda: call(data, group=group, check=False, timeout=30))
            assert found == "a result" or found.startswith(f"RemoteError: {verb}: rank 1 failed during the call")
        check_works(group, backend)


# --- modes in which tensors have no data


def objects(group):
    return easydist.gather_object({"x": 1}, group=group)


CALLS = {name: VERBS[name] for name in ("gather", "broadcast", "reduce", "scatter", "synchronize_rng_states")}
CALLS |= {
    "broadcast": lambda group: easydist.broadcast(torch.ones(2), group=group),
    "gather_object": objects,
    "pad_across_processes": lambda group: easydist.pad_across_processes(torch.ones(2), group=group),
    "broadcast_tensor_dict": lambda group: easydist.broadcast_tensor_dict({"x": 1}, group=group),
    "GatheredParameters": lambda group: easydist.GatheredParameters(LAYER).__enter__(),
}
LAYER = torch.nn.Linear(1, 1)
FAKE = "under FakeTensorMode, where tensors have no data"
FUNCTIONAL = "under FunctionalTensorMode, where tensors stand for others"
RECORDED = "inside make_fx, which records operations on this rank's tensors, not the others' part"
TRACED = "inside torch.jit.trace, which records operations on this rank's tensors, not the others' part"
TRANSFORM = "inside vmap or another transform of torch.func, where one tensor stands for several"


def under_fake_tensor_mode(call):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        call()


def under_functional_tensor_mode(call):
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    with FunctionalTensorMode():
        call()


def inside_make_fx(call):
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: (call(), x)[1])(torch.ones(2))


def inside_jit_trace(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(lambda x: (call(), x + 1)[1], torch.ones(2), check_trace=False)


def inside_vmap(call):
    torch.vmap(lambda row: (call(), row)[1])(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        (under_fake_tensor_mode, FAKE),
        (under_functional_tensor_mode, FUNCTIONAL),
        (inside_make_fx, RECORDED),
        (inside_jit_trace, TRACED),
        (inside_vmap, TRANSFORM),
    ],
)
@distributed(world_size=(1, 2))
def test_a_verb_where_tensors_have_no_data_is_an_error_on_all_ranks(rank, world_size, mode, where):
    group = torch.distributed.group.WORLD
    for operation, call in CALLS.items():
        said = f"{operation}: called {where}; call it outside, with tensors that have data"
        with pytest.raises(TypeError, match=f"^{said}$"):  # the first call of the group is among them
            mode(functools.partial(call, group))
        if world_size > 1:
            with pytest.raises(RemoteError, match=f"rank 1: TypeError: {said}"):
                mode(functools.partial(call, group)) if rank == 1 else call(group)
        mode(easydist.wait_for_everyone)  # moves nothing
        assert easydist.gather(rank).tolist() == list(range(world_size))


@distributed(world_size=2)
def test_both_ends_of_a_pair_raise_where_one_has_no_data(rank):
    said = f"called {FAKE}; call it outside"
    for fake in (0, 1):
        call = (lambda: easydist.recv_tensor_dict(0)) if rank else lambda: easydist.send_tensor_dict({"x": 1}, 1)
        with pytest.raises((TypeError, RemoteError), match=said):
            under_fake_tensor_mode(call) if rank == fake else call()
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_an_error_of_another_group_in_a_body_is_told_to_the_others(rank):
    def body():
        with easydist.together(timeout=within(20)):
            if rank:
                raise error

    error = CollectiveTimeout("in another group")
    with pytest.raises(CollectiveTimeout if rank else RemoteError) as caught:
        body()
    assert caught.value is error if rank else "rank 1" in str(caught.value)
    assert easydist.gather(rank).tolist() == [0, 1]


def test_a_body_that_raises_where_there_is_one_rank_raises_its_own_error():
    with pytest.raises(ValueError, match=r"^alone$") as caught, easydist.together():
        raise ValueError("alone")
    assert caught.value.__cause__ is caught.value.__context__ is None
