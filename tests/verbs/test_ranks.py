"""src= and dst= with a torch group mean one member or raise; group_src= and group_dst= number the members."""

import functools
import inspect
import itertools
import tempfile

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import easydist
from easydist import weights
from easydist.errors import DisagreementError, RemoteError
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

MEMBERS = [1, 2, 3]


def checkpoint(rank, group, at):
    with tempfile.TemporaryDirectory() as folder:
        easydist.save({"r": torch.tensor([rank])}, path := f"{folder}/model.safetensors")
        return weights.broadcast_checkpoint(path, None, group=group, **at)["r"].item()


def scattered(rank, group, at):
    got = [None]
    easydist.scatter_object_list(got, [rank] * (group or dist.group.WORLD).size(), group=group, **at)
    return got[0]


SOURCES = {
    "broadcast": lambda r, g, at: easydist.broadcast(torch.tensor([r]), group=g, **at).item(),
    "scatter": lambda r, g, at: easydist.scatter(torch.full((12,), r), group=g, **at)[0].item(),
    "broadcast_object_list": lambda r, g, at: easydist.broadcast_object_list([r], group=g, **at)[0],
    "scatter_object_list": scattered,
    "broadcast_tensor_dict": lambda r, g, at: easydist.broadcast_tensor_dict({"r": r}, group=g, **at)["r"],
    "broadcast_state_dict": lambda r, g, at: weights.broadcast_state_dict({"r": torch.tensor([r])}, group=g, **at)[
        "r"
    ].item(),
    "broadcast_checkpoint": checkpoint,
}
"""Each returns the rank in the world whose value has arrived."""


def collected(rank, group, at, method="compute"):
    collector = easydist.MetricCollector(group=group)
    collector.update([rank], x=torch.tensor([rank]))
    return list(getattr(collector, method)(**at)) if method == "blocks" else getattr(collector, method)(**at)


def moved(rank, group, at):
    collector = easydist.MetricCollector(group=group, every=1, **at)
    collector.update([rank], x=torch.tensor([rank]))
    return len(collector) == 3 or None


TARGETS = {
    "gather": lambda r, g, at: easydist.gather(torch.tensor([r]), group=g, **at),
    "gather_object": lambda r, g, at: easydist.gather_object(r, group=g, **at),
    "reduce": lambda r, g, at: easydist.reduce(torch.tensor([r]), "sum", group=g, **at),
    "gather_for_metrics": lambda r, g, at: easydist.gather_for_metrics(torch.tensor([r]), total=3, group=g, **at),
    "MetricCollector.compute": collected,
    "MetricCollector.blocks": lambda r, g, at: collected(r, g, at, "blocks")[0],
    "MetricCollector": moved,
}
"""Each returns None on ranks that get nothing."""

VERBS = {**SOURCES, **TARGETS}


def names(verb):
    """Return the name of the first argument, and of torch's."""
    if verb in TARGETS:
        return "dst", "group_dst"
    return ("from_process" if verb in ("broadcast", "scatter", "broadcast_object_list") else "src"), "group_src"


def met(verb, rank, group, at):
    """Return the rank in the world that the call has named: the source, or the only one with a result."""
    if verb in SOURCES:
        return SOURCES[verb](rank, group, at)
    with_result = easydist.gather_object([rank] * (TARGETS[verb](rank, group, at) is not None), group=group)
    return with_result[0] if len(with_result) == 1 else with_result


def text_of(call, *args, **named):
    with pytest.raises((ValueError, TypeError, RemoteError)) as caught:
        call(*args, **named)
    return f"{type(caught.value).__name__}: {caught.value}"


def texts(group, call):
    """Return the errors of all members, which are the same, as one text; the group has to work afterwards."""
    every = easydist.gather_object(text_of(call), group=group)
    assert len(set(every)) == 1, every
    return every[0]


KINDS = [(verb, kind) for i, verb in enumerate(VERBS) for kind in (("group", "mesh") if i % 2 else ("mesh", "group"))]
"""The sample is each verb with one of both, in turn."""


@pytest.mark.parametrize(("verb", "kind"), launching.sampled(KINDS))
@distributed(world_size=4)
def test_a_rank_that_could_be_two_members_is_refused_on_all_ranks(rank, verb, kind):
    group = dist.new_group(MEMBERS)
    if rank == 0:
        return
    passed = DeviceMesh.from_group(group, "cpu") if kind == "mesh" else group
    one, other = names(verb)
    call = VERBS[verb]
    for place in range(3):
        assert met(verb, rank, group, {other: place}) == place + 1
    assert met(verb, rank, group, {}) == ([1, 2, 3] if verb in TARGETS and verb != "MetricCollector" else 1)
    assert texts(group, lambda: call(rank, passed, {one: 2})) == (
        f"ValueError: {verb}: {one}=2 is ambiguous with a group of torch.distributed\n"
        "  as a rank of the world, as in torch's functions: member 1 of the group\n"
        "  as a member of the group, counted from 0: rank 3 of the world\n"
        f"Pass {other}=1 for rank 2 of the world, or {other}=2 for rank 3 of the world."
    )
    assert texts(group, lambda: call(rank, passed, {one: np.int64(0)})).endswith(
        "not in the group\n  as a member of the group, counted from 0: rank 1 of the world\n"
        f"Pass {other}=0 for rank 1 of the world."
    )
    assert texts(group, lambda: call(rank, passed, {one: 3})).endswith(
        "member 2 of the group\n  as a member of the group, counted from 0: there are only 3\n"
        f"Pass {other}=2 for rank 3 of the world."
    )
    assert f"{one}=7 is not a rank of the group, which has 3 ranks (0–2)" in texts(
        group, lambda: call(rank, passed, {one: 7})
    )
    assert f"{other}=3 is not a rank of the group, which has 3 ranks (0–2)" in texts(
        group, lambda: call(rank, passed, {other: 3})
    )
    assert f"{one}= and {other}= are the same argument; pass one of them" in texts(
        group, lambda: call(rank, passed, {one: 1, other: 1})
    )
    mixed = {one: 2} if rank == 2 else {other: 2}
    with pytest.raises((RemoteError, ValueError)) as caught:  # a collector raises its own error on the rank itself
        call(rank, passed, mixed)
    assert "is ambiguous with a group of torch.distributed" in str(caught.value)
    assert met(verb, rank, group, {other: 2}) == 3


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=4)
def test_a_rank_that_is_the_same_member_either_way_is_taken(rank, verb):
    one, other = names(verb)
    group = dist.new_group([0, 1, 3])
    if rank != 2:
        assert met(verb, rank, group, {one: 1}) == 1
        assert met(verb, rank, group, {one: 1} if rank == 1 else {other: 1}) == 1
        assert "ambiguous" in text_of(lambda: met(verb, rank, group, {one: 2}))
    if "etric" not in verb:  # whose samples are three
        for group in (None, dist.group.WORLD):
            assert met(verb, rank, group, {one: 2}) == 2
            assert met(verb, rank, group, {other: 3}) == 3


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=3)
def test_any_integer_names_a_rank(rank, verb):
    for one in (np.int64(1), torch.tensor([1])):
        for name in names(verb):
            assert met(verb, rank, None, {name: one}) == 1


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=3)
def test_what_is_no_integer_is_refused_by_name(rank, verb):
    for one, group, name in itertools.product((1.5, "a", object, True), (None, dist.group.WORLD), names(verb)):
        assert f"{name}={one!r} is not a rank: pass an integer" in text_of(VERBS[verb], rank, group, {name: one})
    assert met(verb, rank, None, {names(verb)[1]: 1}) == 1


@pytest.mark.parametrize("verb", SOURCES)
@distributed(world_size=2)
def test_none_is_no_source(rank, verb):
    one, other = names(verb)
    for group in (None, dist.group.WORLD):
        assert f"{one}=None is not a rank: pass an integer" in text_of(SOURCES[verb], rank, group, {one: None})
        assert met(verb, rank, group, {one: None, other: 1}) == 1


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts ranks")
@distributed(world_size=4)
def test_members_in_an_order_of_their_own(rank):
    group = dist.new_group([3, 1, 0], sort_ranks=False)
    if rank != 2:
        assert easydist.broadcast_object_list([rank], 1, group) == [1]
        assert easydist.broadcast_object_list([rank], group=group) == [3]
        told = text_of(lambda: easydist.broadcast_object_list([rank], src=0, group=group))
        assert "ValueError: broadcast_object_list: src=0 is ambiguous" in told
        assert told.endswith("Pass group_src=2 for rank 0 of the world, or group_src=0 for rank 3 of the world.")


@distributed(world_size=4)
def test_torchs_positional_order_and_device(rank):
    group = dist.new_group([0, 1, 3])
    if rank == 2:
        return
    for module in (dist, easydist):
        module.broadcast_object_list(mine := [rank], 1, group)
        assert mine == [1]
        module.broadcast_object_list(mine := [rank], 0, group, torch.device("cpu"))
        assert mine == [0]
        module.broadcast_object_list(mine := [rank], group=group, device=torch.device("cpu"), group_src=2)
        assert mine == [3]
        out = [None]
        module.scatter_object_list(out, [0, 1, 3] if rank == 1 else None, 1, group)
        assert out == [rank]
        tensor = torch.tensor([rank])
        module.broadcast(tensor, 1, group)
        assert tensor.item() == 1


@distributed(world_size=4)
def test_pairs_count_in_the_group_or_raise(rank):
    group = dist.new_group(MEMBERS)
    if rank == 0:
        return
    for what in ("tensor_dict", "object"):
        send, recv = (getattr(easydist, f"{way}_{what}") for way in ("send", "recv"))
        sending, receiving = functools.partial(send, {"r": 1}, group=group), functools.partial(recv, group=group)
        for call, name, one in ((sending, f"send_{what}", "dst"), (receiving, f"recv_{what}", "src")):
            assert text_of(call, **{one: 2}).startswith(f"ValueError: {name}: {one}=2 is ambiguous")
            assert "are the same argument" in text_of(call, **{one: 1, f"group_{one}": 1})
            assert f"group_{one}=3 is not a rank" in text_of(call, **{f"group_{one}": 3})
            assert text_of(call) == f"TypeError: {name}() missing 1 required positional argument: '{one}'"
        if rank == 3:
            send({"r": 3}, group_dst=0, group=group)
        if rank == 1:
            assert recv(group_src=2, group=group) == {"r": 3}
    assert easydist.gather(rank, group=group).tolist() == MEMBERS


@distributed(world_size=3)
def test_different_members_are_a_disagreement_under_either_name(rank):
    group = dist.new_group([0, 1, 2])
    with pytest.raises(DisagreementError, match=r"rank 1: broadcast\(from_process=1\)"):
        easydist.broadcast(torch.ones(1), group=group, **({"group_src": 1} if rank == 1 else {"from_process": 0}))
    with pytest.raises(DisagreementError, match=r"rank 2: gather\(dst=2, dim=0\)"):
        easydist.gather(torch.ones(1), dst=rank, group=group)
    assert easydist.gather(rank, group=group).tolist() == [0, 1, 2]


@distributed(world_size=4)
def test_groups_that_recover_returns_follow_the_same_rule(rank):
    group = dist.new_group(MEMBERS)
    if rank == 0:
        return
    new = easydist.recover(group, timeout=launching.within(20))
    try:
        assert easydist.broadcast_object_list([rank], group=new) == [1]
        assert easydist.broadcast_object_list([rank], group_src=2, group=new) == [3]
        assert "Pass group_src=1 for rank 2 of the world, or group_src=2 for rank 3 of the world." in texts(
            new, lambda: easydist.broadcast_object_list([rank], 2, new)
        )
    finally:
        dist.destroy_process_group(new)


@distributed(world_size=4)
def test_communicators_and_coordinators_count_their_own_members(rank):
    coordinator = GroupCoordinator([[0], MEMBERS], rank, "gloo", False, group_name="own")
    if rank:
        assert coordinator.broadcast_object(rank, 2) == 3
        assert coordinator.broadcast(torch.tensor([rank]), 1).item() == 2
        got = coordinator.gather(torch.tensor([rank]), 2)
        assert got is None if rank != 3 else got.tolist() == MEMBERS
        assert easydist.broadcast_object_list([rank], 2, coordinator) == [3]
        assert easydist.broadcast_object_list([rank], group=coordinator, group_src=2) == [3]
        comm = easydist.comms.wrap(coordinator.cpu_group)
        assert easydist.broadcast_object_list([rank], 2, comm) == [3]
    coordinator.destroy()


@distributed(world_size=4)
def test_weights_from_several_sources(rank):
    group = dist.new_group(MEMBERS)
    if rank:
        mine = {"r": torch.tensor([rank])}
        told = texts(group, lambda: weights.broadcast_state_dict(mine, [1, 2], group=group))
        assert told.endswith(
            "Pass group_src=[0, 1] for ranks 1, 2 of the world, or group_src=[1, 2] for ranks 2, 3 of the world."
        )
        got = weights.broadcast_state_dict({"r": torch.tensor([9])} if rank < 3 else mine, group=group, group_src=2)
        assert got["r"].item() == 3
        member = weights.WeightPublisher(mine, group=group, src=1)
        assert "src=1 is ambiguous" in texts(group, member.publish)
        assert "regroup: src=1 is ambiguous" in texts(group, lambda: member.regroup(group, 1))
        member = weights.WeightPublisher(mine, group=group, group_src=2) if rank == 3 else None
        member = member or weights.WeightReceiver(group=group, group_src=2)
        assert (member.publish() if rank == 3 else member.receive()) == 1
        assert member.regroup(group, group_src=2) == 1
        assert rank == 3 or member.state["r"].item() == 3
