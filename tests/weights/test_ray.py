"""easydist.ray on real Ray actors: what arrives, what all of them raise, and groups that stand beside others."""

import gc
import os

import pytest
import torch
from actors import MARKS, SECOND, Member, each, members, outcome, start, travels
from launching import examples, within

import easydist

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = MARKS
travels(__name__)

# --- what arrives


def made(case):
    if case == "many":
        return {f"layer.{i}": torch.full((2048,), i, dtype=torch.bfloat16) for i in range(200)}
    if case == "tiny":
        return {str(i): torch.tensor([i]) for i in range(5000)}
    if case == "large":
        return {str(i): torch.full((1 << 21,), i, dtype=torch.bfloat16) for i in range(8)}
    if case == "all large":
        return {str(i): torch.full((1 << 21,), i, dtype=torch.bfloat16) for i in range(64)}
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
    if case in ("cut", "all large"):
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
    for src, case in ((1, "cut"), (0, "all large"), (0, "many"), (0, "tiny"), (1, "strange")):
        assert all(each(actors[1:3], moves, case, src, "two")), case
    assert all(each(actors, moves, "many", 2, "four"))


def gibibyte(rank, name):
    """Numbers from 0 on; no other copy of them is needed to compare."""
    from easydist.ray import ray_broadcast_tensor_dict

    numbers = torch.arange(1 << 27) if rank == 1 else torch.empty(1 << 27, dtype=torch.int64)
    place = numbers.data_ptr()
    got = ray_broadcast_tensor_dict({"one": numbers}, 1, group_name=name)["one"]
    are_right = all(part.equal(torch.arange(i << 20, (i + 1) << 20)) for i, part in enumerate(got.split(1 << 20)))
    easydist.memory.release()
    return are_right and got.data_ptr() == place


@pytest.mark.battery
def test_a_gibibyte_arrives(actors):
    easydist.ray.create_group(actors[:2], "gibibyte", timeout=within(60))
    assert all(each(actors[:2], gibibyte, "gibibyte"))


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


def no_source(rank, name):
    from easydist.ray import ray_broadcast_tensor_dict

    ray_broadcast_tensor_dict({}, src=4, group_name=name)


FAULTS = {
    "meta": ("RemoteError", "is a meta tensor, which has no data"),
    "sparse": ("RemoteError", "not a dense tensor"),
    "object": ("RemoteError", "is an object"),
    "shape": ("DisagreementError", "w  rank 0: float32 (2,)   rank 1: float32 (3,)"),
    "src": ("ValueError", "src=4 is not a rank of the group"),
    "sources": ("DisagreementError", "src=1"),
    "backend": ("ValueError", "backend='mpi' is none of nccl, gloo"),
    "device": ("RemoteError", "this actor has no GPU"),
    "nobody": ("ValueError", "this process is in no group 'nobody'"),
}


def test_every_actor_raises_the_same_and_the_group_works_on(trio):
    easydist.ray.create_group(trio, "faults", timeout=within(60))
    for case, (kind, text) in FAULTS.items():
        found = each(trio, refused, case, "faults", seconds=5)
        assert all(one[0] == kind and text in one[1] for one in found), (case, found)
        assert len(set(found)) == 1, case
    for call in start(trio, no_source, "faults"):  # the error has its class in the driver, too
        with pytest.raises(ValueError, match=r"src=4 is not a rank of the group"):
            ray.get(call, timeout=within(5))
    assert all(each(trio, moves, "strange", 0, "faults"))


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


def leads(actor, others, seconds):
    """Make a group of other actors and of this one, which is busy with that."""
    me = ray.get_runtime_context().current_actor
    easydist.ray.create_group([*others, me], "led", timeout=seconds)
    sent = start(others, moves, "strange", len(others), "led")
    return [moves(len(others), "strange", len(others), "led"), *ray.get(sent, timeout=seconds)]


def test_an_actor_makes_a_group_with_itself(actors):
    *others, leader = actors
    made = leader.__ray_call__.remote(leads, others, within(60))
    assert ray.get(made, timeout=within(120)) == [True] * 4


def test_an_actor_that_is_there_twice_is_refused(actors):
    with pytest.raises(ValueError, match=r"^create_group: an actor is there twice, but has only one rank$"):
        easydist.ray.create_group([*actors[:2], actors[0]], "twice")


def test_what_is_no_handle_of_an_actor_is_named(actors):
    for wrong in (ray.remote(Member), ray.put(3), None):
        with pytest.raises(TypeError, match=r"^create_group: rank 1 is no handle of an actor: "):
            easydist.ray.create_group([actors[0], wrong], "wrong")


def test_what_is_no_rank_or_no_number_of_actors_is_named():
    with pytest.raises(TypeError, match=r"^rank='0' is not a rank: pass an integer$"):
        easydist.ray.init_group(2, "0", "wrong")
    with pytest.raises(TypeError, match=r"^world_size=2.0 is not a number of actors: pass an integer$"):
        easydist.ray.init_group(2.0, 0, "wrong")


def test_a_group_of_ray_util_collective_is_taken(actors):
    assert all(each(actors[2:], collective, "theirs"))  # those without a DDP world


def whereabouts(rank, name):
    """The address and the way by which large tensors would go."""
    from easydist.state import communicators

    met = communicators(easydist.ray.group(name)).met()
    return ray.util.get_node_ip_address(), met.control.get_backend(), [sorted(host) for host in met._hosts]


@pytest.mark.battery
def test_actors_of_two_nodes(cluster, actors):
    """Two raylets with addresses of their own; the actors of one share memory, one of each talks to the other node."""
    cluster.add_node(
        node_ip_address=SECOND, resources={"second": 8}, env_vars={"EASYDIST_HOST_ID": "second"}, **cluster.node
    )
    far = members(2, "second")
    spread = [actors[0], far[0], actors[1], far[1]]
    easydist.ray.create_group(spread, "nodes", timeout=within(60))
    for src, case in ((0, "strange"), (1, "large"), (3, "many"), (2, "tiny")):
        assert all(each(spread, moves, case, src, "nodes")), case
    addresses, backends, hosts = zip(*each(spread, whereabouts, "nodes"), strict=True)
    assert addresses[1] == addresses[3] == SECOND != addresses[0] == addresses[2]
    assert set(backends) == {"hierarchical"}
    assert all(found == [[0, 2], [1, 3]] for found in hosts)
    easydist.ray.create_group([actors[0], far[1]], "nodes", timeout=within(60))  # one on each
    assert all(each([actors[0], far[1]], moves, "strange", 1, "nodes"))
    ray.kill(far[0])
    with pytest.raises(easydist.PeerLostError, match="the actor of rank 1 has died"):
        easydist.ray.create_group(spread, "nodes", timeout=within(60))


def open_files(rank):
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def leaves(rank, name):
    easydist.ray.destroy_group(name)
    return outcome(lambda: easydist.ray.group(name))


def known_to_ray():
    from ray.experimental.internal_kv import _internal_kv_list

    return sorted(_internal_kv_list("easydist/", namespace="easydist"))


def test_nothing_is_left_behind(actors):
    """No file, no segment, no key: of groups, and of calls in them; ``make stress`` makes 200 of the first."""
    pair = actors[:2]

    def once(calls):
        easydist.ray.create_group(pair, "again", timeout=within(60))
        for _ in range(calls):
            assert all(each(pair, moves, "strange", 0, "again"))
        assert all(found[0] == "ValueError" for found in each(pair, leaves, "again"))

    for _ in range(3):
        once(1)
    before, segments, keys = each(pair, open_files), set(os.listdir("/dev/shm")), known_to_ray()
    for _ in range(examples(12)):
        once(1)
    once(200)
    assert all(now <= then + 4 for now, then in zip(each(pair, open_files), before, strict=True))
    assert not {name for name in set(os.listdir("/dev/shm")) - segments if "easydist" in name}
    assert known_to_ray() == keys
