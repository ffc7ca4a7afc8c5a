"""easydist.ray on real Ray actors: what arrives, what all of them raise, and groups that come and go."""

import gc
import os
import sys

import pytest
import torch
from launching import within

import easydist
from easydist import CollectiveTimeout, PeerLostError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install easydist[ray]")
pytestmark = [
    pytest.mark.slow,
    # Ray's own, of processes and sockets that it leaves to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Member:
    """An actor without methods of its own: groups and calls need none."""


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(easydist.__file__)))
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            object_store_memory=80 << 20,
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def actors(cluster):
    """Four actors that no test ends."""
    found = members(4)
    yield found
    for one in found:
        ray.kill(one)


def members(count):
    return [ray.remote(num_cpus=0)(Member).remote() for _ in range(count)]


def start(actors, call, *args):
    """Begin a call on every actor; ``call(rank, *args)``."""
    return [one.__ray_call__.remote(lambda _, *given: call(*given), r, *args) for r, one in enumerate(actors)]


def each(actors, call, *args):
    """What a call gives on every actor."""
    return ray.get(start(actors, call, *args), timeout=within(60))


def outcome(call):
    """The error that a call raises, as its class and text; or its result."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


# --- what arrives


def made(case):
    if case == "many":
        return {f"layer.{i}": torch.full((2048,), i, dtype=torch.bfloat16) for i in range(200)}
    if case == "tiny":
        return {str(i): torch.tensor([i]) for i in range(5000)}
    if case == "large":
        return {str(i): torch.full((1 << 21,), i, dtype=torch.bfloat16) for i in range(8)}
    if case == "cut":  # three and a half buckets
        return {"long": torch.arange(7 << 20, dtype=torch.int64).repeat(4)}
    strange = torch.arange(12, dtype=torch.int16).view(3, 4)
    return {
        "strided": strange.t(),
        "expanded": strange[:1].expand(5, 4),
        "fp8": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "u16": torch.tensor([65535], dtype=torch.uint16),
        "tied": strange,
        "same": strange,
        "empty": torch.zeros(0, 3),
        "grad": torch.ones(2, requires_grad=True),
    }


def moves(rank, case, src, name):
    from easydist.ray import ray_broadcast_tensor_dict

    def is_exact(got):
        return list(got) == list(want) and all(
            (one.dtype, one.shape) == (got[name].dtype, got[name].shape)
            and torch.equal(got[name].contiguous().view(torch.uint8), one.detach().contiguous().view(torch.uint8))
            for name, one in want.items()
            if one.numel() or got[name].numel() == 0
        )

    want = made(case)
    mine = want if rank == src else {}
    new = ray_broadcast_tensor_dict(mine, src, group_name=name)
    if case == "cut":
        return new is mine and is_exact(new)
    none = ray_broadcast_tensor_dict(want if rank == src else None, src=src, group_name=name, backend="gloo")
    there = {key: torch.zeros_like(one) for key, one in reversed(want.items())} if rank != src else want
    there = there if rank == src else {"stale": torch.ones(1), **there}
    places = {key: one.data_ptr() for key, one in there.items()}
    place = ray_broadcast_tensor_dict(there, src, None, name, "nccl", True, True)
    in_place = place is there and all(place[key].data_ptr() == places[key] for key in want)
    return new is mine and is_exact(new) and is_exact(none) and in_place and set(place) == set(want)


def test_bytes_are_exact_from_any_source(actors):
    easydist.ray.create_group(actors, "four", timeout=within(60))
    easydist.ray.create_group(actors[1:3], "two", timeout=within(60))  # while these are in the other one, too
    for src, case in ((0, "many"), (1, "tiny"), (3, "large"), (1, "strange")):
        assert all(each(actors, moves, case, src, "four")), case
    for src, case in ((1, "cut"), (0, "many"), (1, "strange")):
        assert all(each(actors[1:3], moves, case, src, "two")), case
    assert all(each(actors, moves, "many", 2, "four"))


def shares_memory(rank, name):
    from easydist.state import communicators

    return communicators(easydist.ray.group(name)).met().control.get_backend()


def sends_object(rank, name):
    from easydist.ray import ray_broadcast_object

    return ray_broadcast_object({"step": 3, "ids": torch.arange(2)} if rank == 1 else None, 1, group_name=name)


def test_objects_arrive_and_one_node_shares_memory(actors):
    easydist.ray.create_group(actors, "objects", timeout=within(60))
    assert all(got["step"] == 3 and got["ids"].tolist() == [0, 1] for got in each(actors, sends_object, "objects"))
    assert each(actors, shares_memory, "objects") == ["shm"] * 4


# --- what all of them raise


def refused(rank, case, name):
    from easydist.ray import ray_broadcast_tensor_dict

    bad = {
        "meta": lambda: torch.ones(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "object": lambda: object(),
    }
    fine = {"w": torch.ones(2)}
    if case in bad:
        return outcome(lambda: ray_broadcast_tensor_dict({"w": bad[case]()} if rank == 0 else {}, group_name=name))
    if case == "shape":
        there = {"w": torch.zeros(3 if rank == 1 else 2)}
        found = outcome(lambda: ray_broadcast_tensor_dict(fine if rank == 0 else there, group_name=name))
        return found if rank == 0 or not there["w"].any() else "written"
    options = {
        "src": {"src": 4},
        "sources": {"src": rank % 2},
        "backend": {"backend": "mpi"},
        "device": {"device": "cuda"} if rank == 1 else {},
        "nobody": {"group_name": "nobody"},
    }
    return outcome(lambda: ray_broadcast_tensor_dict(fine, **{"group_name": name, **options[case]}))


FAULTS = {
    "meta": ("RemoteError", "not a dense tensor"),
    "sparse": ("RemoteError", "not a dense tensor"),
    "object": ("RemoteError", "is a object"),
    "shape": ("DisagreementError", "w  rank 0: float32 (2,)   rank 1: float32 (3,)"),
    "src": ("ValueError", "src=4 is not a rank of the group"),
    "sources": ("DisagreementError", "src=1"),
    "backend": ("ValueError", "backend='mpi' is none of nccl, gloo"),
    "device": ("RemoteError", "this actor has no GPU"),
    "nobody": ("ValueError", "this process is in no group 'nobody'"),
}


def test_every_actor_raises_the_same_and_the_group_works_on(actors):
    easydist.ray.create_group(actors, "faults", timeout=within(60))
    for case, (kind, text) in FAULTS.items():
        found = each(actors, refused, case, "faults")
        assert all(one[0] == kind and text in one[1] for one in found), (case, found)
        assert len(set(found)) == 1, case
    assert all(each(actors, moves, "strange", 0, "faults"))


# --- members that are lost


def waits(rank, name, when):
    """Rank 1 ends ``when`` it has been told; the others raise."""
    import os

    from easydist.ray import ray_broadcast_tensor_dict
    from easydist.weights import target

    class Ends(target.Target):
        def take(self, message, buffer):
            if rank == 1:
                os._exit(1)
            super().take(message, buffer)

    if when == "before" and rank == 1:
        os._exit(1)
    easydist.weights.exchange.Target = Ends
    try:
        sent = {str(i): torch.ones(1 << 20) for i in range(8)}
        return outcome(lambda: ray_broadcast_tensor_dict(sent if rank == 0 else None, group_name=name))
    finally:
        easydist.weights.exchange.Target = target.Target


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_lost_actor_is_named_and_replaced(actors, when):
    (mortal,) = members(1)
    group = [actors[0], mortal, actors[1]]
    easydist.ray.create_group(group, "mortals", timeout=within(60))
    refs = start(group, waits, "mortals", when)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(refs[1], timeout=within(60))
    for kind, text in ray.get([refs[0], refs[2]], timeout=within(60)):
        assert kind == "PeerLostError"
        assert "rank 1 is lost" in text
    with pytest.raises(PeerLostError, match="the actor of rank 1 has died") as caught:
        easydist.ray.create_group(group, "mortals", timeout=within(60))
    assert caught.value.rank == 1
    easydist.ray.create_group([*members(1), *actors[:2]], "mortals", timeout=within(60))  # under the same name
    easydist.ray.create_group(actors[:3], "mortals", timeout=within(60))
    assert all(each(actors[:3], moves, "strange", 2, "mortals"))


def blocks(rank, signal):
    return ray.get(signal.wait.remote())


@ray.remote(num_cpus=0, max_concurrency=2)
class Signal:
    """Lets an actor be silent for as long as the test needs."""

    def __init__(self):
        import asyncio

        self.event = asyncio.Event()

    async def wait(self):
        await self.event.wait()

    async def set(self):
        self.event.set()


def test_a_silent_actor_is_named(actors):
    signal = Signal.remote()
    silent = actors[2].__ray_call__.remote(lambda _: blocks(2, signal))
    with pytest.raises(CollectiveTimeout, match=r"ranks \[2\] of 3") as caught:
        easydist.ray.create_group(actors[:3], "silent", timeout=1.0)
    assert caught.value.missing == (2,)
    ray.get(signal.set.remote(), timeout=within(60))
    ray.get(silent, timeout=within(60))
    easydist.ray.create_group(actors[:3], "silent", timeout=within(60))  # what it was asked before is forgotten
    assert all(each(actors[:3], moves, "strange", 0, "silent"))


# --- beside others


def trains(rank, path, name):
    """DDP of two actors in torch's own world, and a group of three beside it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from easydist.ray import ray_broadcast_tensor_dict

    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        trained = DistributedDataParallel(model)
        for _ in range(2):
            trained(torch.full((1, 2), float(rank))).sum().backward()
            with torch.no_grad():
                model.weight -= model.weight.grad
            got = ray_broadcast_tensor_dict(model.state_dict() if rank == 0 else {}, group_name=name)
        dist.destroy_process_group()
    else:
        for _ in range(2):
            got = ray_broadcast_tensor_dict({}, group_name=name)
    return got["weight"].tolist()


def joins(rank, size, name):
    easydist.ray.init_group(size, rank, name, timeout=60.0)


def test_groups_stand_beside_ddp_and_one_another(actors, tmp_path):
    each(actors[:3], joins, 3, "beside")
    first, *rest = each(actors[:3], trains, tmp_path / "world", "beside")
    assert rest == [first, first]
    assert first[0][0] < 1
    each(actors[:3], joins, 3, "beside")  # the name again, by the members themselves
    assert all(each(actors[:3], moves, "strange", 1, "beside"))


def collective(rank, name):
    import ray.util.collective as collective

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    collective.init_collective_group(2, rank, "gloo", name)
    return moves(rank, "strange", 1, name)


def test_a_group_of_ray_util_collective_is_taken(actors):
    assert all(each(actors[2:], collective, "theirs"))  # those without a DDP world


def open_files(rank):
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def leaves(rank, name):
    easydist.ray.destroy_group(name)
    return outcome(lambda: easydist.ray.group(name))


def test_nothing_is_left_behind(actors):
    pair = actors[:2]

    def once():
        easydist.ray.create_group(pair, "again", timeout=within(60))
        assert all(each(pair, moves, "strange", 0, "again"))
        assert all(found[0] == "ValueError" for found in each(pair, leaves, "again"))

    for _ in range(3):
        once()
    before, segments = each(pair, open_files), set(os.listdir("/dev/shm"))
    for _ in range(12):
        once()
    assert all(now <= then + 4 for now, then in zip(each(pair, open_files), before, strict=True))
    assert not {name for name in set(os.listdir("/dev/shm")) - segments if "easydist" in name}


# --- versions


def within_each(actors, call, *args):
    """Begin a call on every actor; ``call(actor, rank, *args)`` keeps in the actor what it needs later."""
    return [one.__ray_call__.remote(call, rank, *args) for rank, one in enumerate(actors)]


def enrols(actor, rank, size, name, fill):
    """Become the publisher or a receiver of a new generation; returns the version, and the time it took."""
    import time

    began = time.monotonic()
    easydist.ray.init_group(size, rank, name, timeout=60.0)
    group = easydist.ray.group(name)
    if not hasattr(actor, "member"):
        actor.weights = {str(i): torch.full((1 << 18,), fill) for i in range(8)}
        kind = easydist.weights.WeightPublisher if rank == 0 else easydist.weights.WeightReceiver
        actor.member = kind(actor.weights, group=group)
    version = actor.member.regroup(group)
    return version, time.monotonic() - began


def publishes(actor, rank, fill, mortal=None, when=None):
    """The next version; ``mortal`` ends ``when`` it has come so far. Gives version, values, and the error if any."""
    import os

    from easydist.weights import exchange, versions

    for value in actor.weights.values() if rank == 0 else ():
        value.fill_(fill)

    def end(*args):
        os._exit(1)

    if rank == mortal:
        if when == "header":
            end()
        elif when == "middle":
            exchange._Side.take = end
        else:
            versions.agree = end
    call = actor.member.publish if rank == 0 else actor.member.receive
    found = outcome(call)
    return actor.member.version, sorted({float(one.mean()) for one in actor.weights.values()}), found


def test_a_version_is_complete_or_not_there_whoever_is_lost(actors):
    """A receiver or the publisher ends before the header, in the middle, before the last acknowledgement."""
    *spare, second, first = members(5)
    group, version = [first, second, actors[3]], 0
    for mortal, when in ((1, "header"), (0, "middle"), (1, "acknowledgement")):
        enrolled = ray.get(within_each(group, enrols, 3, "team", float(version)), timeout=within(60))
        assert [found[0] for found in enrolled] == [version] * 3
        version += 1
        found = ray.get(within_each(group, publishes, float(version)), timeout=within(60))
        assert found == [(version, [float(version)], version)] * 3
        refs = within_each(group, publishes, -1.0, mortal, when)
        survivors = [rank for rank in range(3) if rank != mortal]
        for rank, (has, values, error) in zip(
            survivors, ray.get([refs[r] for r in survivors], timeout=within(60)), strict=True
        ):
            assert has == version
            assert rank == 0 or values == [float(version)]
            assert error[0] == "PeerLostError"
            assert f"rank {mortal} is lost" in error[1]
        group[mortal] = spare.pop()
    enrolled = ray.get(
        within_each(group, enrols, 3, "team", 0.0), timeout=within(60)
    )  # the new publisher goes on where the old one was
    assert [found[0] for found in enrolled] == [version] * 3
    found = ray.get(within_each(group, publishes, 77.0), timeout=within(60))
    assert found == [(version + 1, [77.0], version + 1)] * 3
