"""WeightPublisher and WeightReceiver: one complete version everywhere, whatever happens; deaths are in test_ray."""

import asyncio
import copy

import pytest
import torch
import torch.distributed as dist
from counting import recorded
from torch import nn
from torch.distributed.tensor import DTensor
from trees import assert_same

import easydist
from easydist import DisagreementError, RemoteError, weights
from easydist.testing import distributed
from easydist.weights import WeightPublisher, WeightReceiver


def net(fill):
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        for value in made.state_dict().values():
            value.fill_(fill)
    return made


def state(fill):
    return {name: value.clone() for name, value in net(fill).state_dict().items()}


@pytest.mark.slow
@distributed(world_size=(1, 3))
def test_receivers_have_what_was_published(rank, world_size):
    trained = net(1)
    mine = [net(0), {**state(0), "note": 0}, None][rank]
    mine = net(0) if rank == 1 else mine
    member = WeightPublisher(trained) if rank == 0 else WeightReceiver(mine)
    places = []
    assert member.version == 0
    for fill, version in ((1, 1), (2, 2), (7, 10)):
        trained.load_state_dict(state(fill))
        got = member.publish(None if fill < 7 else 10) if rank == 0 else member.receive()
        assert (got, member.version) == (version, version)
        if rank == 1:
            assert member.state is mine
            assert_same(dict(mine.state_dict()), state(fill))
        if rank == 2:
            assert_same(member.state, state(fill))
            places.append(member.state["0.weight"].data_ptr())
    if rank == 2:  # the third version came into the memory of the first
        assert places[0] == places[2] != places[1]
    if rank == 0:
        with recorded() as operations:
            member.publish()
        assert [kind for kind, _ in operations if kind == "header"] == ["header"] * (3 if world_size > 1 else 0)
    elif rank < world_size:
        member.receive()


@pytest.mark.slow
@distributed(world_size=3)
def test_what_cannot_be_a_version_is_refused_everywhere(rank):
    mine = state(0)
    member = WeightPublisher(state(5)) if rank == 0 else WeightReceiver(mine)

    def step(*version):
        return member.publish(*version) if rank == 0 else member.receive()

    def refused(error, match, *version):
        before = copy.deepcopy(mine), member.version
        with pytest.raises(error, match=match):
            step(*version)
        assert_same((mine, member.version), before)

    step(5)
    refused(RemoteError, "version 5 is not newer than 5, which was published before", 5)
    refused(RemoteError, "version 3 is not newer than 5", 3)
    refused(RemoteError, f"version {10**30} is too large", 10**30)
    refused(RemoteError, r"TypeError: version=6\.5 is not a version: pass an integer", 6.5)
    if rank == 0:
        member = WeightPublisher(state(6))
    refused(RemoteError, "version 1 is not newer than 5, which this receiver has")
    if rank == 0:
        member = WeightPublisher({"other": torch.ones(1)})
    refused(DisagreementError, "other  rank 0: float32 \\(1,\\)   rank 1: missing", 6)
    refused(DisagreementError, "filter= and rename= of the WeightPublisher change what is sent", 6)
    if rank == 0:
        member = WeightPublisher(state(8))
    assert step(8) == 8
    assert rank == 0 or assert_same(mine, state(8)) is None


@pytest.mark.slow
@distributed(world_size=4)
def test_a_new_member_gets_the_version_that_the_others_have(rank):
    first, everyone = dist.new_group([0, 1, 2]), dist.new_group()
    trained = state(3)
    member = WeightPublisher(trained, group=first) if rank == 0 else WeightReceiver(group=first if rank < 3 else None)
    for _ in range(4 if rank < 3 else 0):
        member.publish() if rank == 0 else member.receive()
    for value in trained.values():
        value.zero_()  # the trainer goes on; what version 4 is does not change
    assert member.regroup(everyone) == member.version == 4
    assert rank == 0 or assert_same(member.state, state(3)) is None
    if rank == 0:  # a new publisher goes on behind the version that the receivers have
        member = WeightPublisher(state(9), group=everyone)
    with recorded() as operations:
        assert member.regroup(everyone) == 4
    assert "broadcast" not in [kind for kind, _ in operations]
    assert (member.publish() if rank == 0 else member.receive()) == 5
    assert rank == 0 or assert_same(member.state, state(9)) is None


@distributed(world_size=3)
def test_a_receiver_whose_rank_is_src_is_refused_everywhere(rank):
    """It would send its own weights to the others."""
    trained, mine = state(1), state(0)
    member = WeightPublisher(trained) if rank == 2 else WeightReceiver(mine if rank == 0 else None)
    match = "rank 0: ValueError: src= names this rank as a publisher, but it is a WeightReceiver"
    for call in ("publish" if rank == 2 else "receive", "regroup"):
        member.version = int(call == "regroup" and rank == 2)
        with pytest.raises(RemoteError, match=match):
            getattr(member, call)()
    assert member.regroup(src=2) == 1
    assert rank == 2 or assert_same(member.state, state(1)) is None


@distributed(world_size=2)
def test_an_empty_dict_gets_new_tensors_which_stay(rank):
    mine, tied = {}, torch.zeros(3)
    trained = {"w": tied, "same": tied, "step": 0}
    member = WeightPublisher(trained) if rank == 0 else WeightReceiver(mine)
    for fill in (1, 2, 3):
        trained["w"].fill_(fill)
        trained["step"] = fill
        kept = mine.get("w")
        member.publish() if rank == 0 else member.receive()
        if rank == 1:
            assert_same(mine, trained)
            assert kept is None or mine["w"] is kept
            assert mine["w"] is mine["same"]


def after_the_second_version(rank, is_heard):
    """The weights, and a member that has received them as version 2; it raises if it has not heard that all have."""
    trained = state(1)
    member = WeightPublisher(trained) if rank == 0 else WeightReceiver()
    move, end = (member.publish, "use") if rank == 0 else (member.receive, "hold")
    move()
    for value in trained.values():
        value.fill_(2)
    if is_heard:
        move()
        return trained, member
    setattr(member, end, lambda version: (_ for _ in ()).throw(ConnectionError("not heard")))
    with pytest.raises(ConnectionError):
        move()
    delattr(member, end)
    assert (member.version, member.pending) == (1, 2)
    return trained, member


@pytest.mark.slow
@distributed(world_size=3)
def test_a_version_that_one_member_has_committed_is_complete_on_all(rank):
    """The last acknowledgement was heard by rank 1 alone, so that the others raised; they have all of the version."""
    trained, member = after_the_second_version(rank, is_heard=rank == 1)
    for value in trained.values():
        value.zero_()
    assert member.regroup() == 2
    assert (member.version, member.pending) == (2, None)
    assert rank == 0 or assert_same(member.state, state(2)) is None


@pytest.mark.slow
@distributed(world_size=3)
def test_a_version_that_waits_for_commit_is_gone_once_another_one_comes_into_its_memory(rank):
    """Rank 1 holds version 2 while the others go on to 3; it has received that when regroup fails."""

    def fail(room, manifest):
        raise ConnectionError("lost")

    pair, mine = dist.new_group([0, 2]), net(0)
    member = WeightPublisher(trained := state(1)) if rank == 0 else WeightReceiver(mine if rank == 1 else None)
    for fill in (1, 2):
        for value in trained.values() if rank == 0 else ():
            value.fill_(fill)
        member.publish() if rank == 0 else member.arrive()
        if rank and (rank, fill) != (1, 2):
            member.commit()
    if rank != 1:
        member.regroup(pair)
        member.publish() if rank == 0 else member.receive()
    else:
        member.fill = fail
    with pytest.raises(ConnectionError if rank == 1 else RemoteError, match="lost"):
        member.regroup(dist.group.WORLD)
    if rank == 1:
        del member.fill
        assert (member.version, member.arrived) == (1, None)
        with pytest.raises(RuntimeError, match="no version has arrived"):
            member.commit()
        assert_same(dict(mine.state_dict()), state(1))
    assert member.regroup(dist.group.WORLD) == member.version == 3
    assert rank == 0 or assert_same(dict(member.weights() if rank == 2 else mine.state_dict()), state(2)) is None


@pytest.mark.slow
@distributed(world_size=3)
def test_a_version_that_no_member_has_committed_is_forgotten_by_all(rank):
    """All have received it, but none has heard that all have."""
    _, member = after_the_second_version(rank, is_heard=False)
    assert member.regroup() == 1
    assert (member.version, member.pending) == (1, None)
    assert rank == 0 or assert_same(member.state, state(1)) is None
    assert (member.publish() if rank == 0 else member.receive()) == 2
    assert rank == 0 or assert_same(member.state, state(2)) is None


@pytest.mark.slow
@distributed(world_size=3)
def test_a_version_that_has_arrived_is_used_from_commit_on(rank):
    trained, mine = state(1), [None, net(0), None][rank]
    member = WeightPublisher(trained) if rank == 0 else WeightReceiver(mine)

    def serves():
        return dict(mine.state_dict()) if rank == 1 else member.state

    for fill in (1, 2, 3):
        for value in trained.values():
            value.fill_(fill)
        before = copy.deepcopy(serves()) if rank else None
        got = member.publish() if rank == 0 else member.arrive()
        assert got == member.newest == fill
        if rank == 0:
            continue
        assert (member.version, member.arrived) == (fill - 1, fill)
        assert_same(serves(), before)
        assert member.commit() == member.version == fill
        assert member.arrived is None
        assert_same(serves(), state(fill))
    if rank:
        with pytest.raises(RuntimeError, match=r"no version has arrived that could be used; call arrive\(\) first"):
            member.commit()

    # One that waits for commit() is kept: by the next transfer, and by regroup, which gives it to a new member.
    for value in trained.values():
        value.fill_(4)
    assert (member.publish() if rank == 0 else member.arrive()) == 4
    with pytest.raises(RemoteError, match="version 4 has arrived, and waits for commit"):
        member.publish() if rank == 0 else member.arrive()
    for value in trained.values():
        value.zero_()
    if rank == 2:
        member = WeightReceiver()
    assert member.regroup() == 4
    assert (member.version, getattr(member, "arrived", None)) == [(4, None), (3, 4), (4, None)][rank]
    assert rank != 1 or assert_same(serves(), state(3)) is None
    assert rank != 2 or assert_same(serves(), state(4)) is None
    assert (member.publish() if rank == 0 else member.receive()) == 5
    assert rank == 0 or assert_same(serves(), state(0)) is None


@pytest.mark.slow
@distributed(world_size=2)
def test_an_asyncio_program_goes_on_while_a_version_comes(rank):
    if rank == 0:
        member = WeightPublisher(trained := state(0))
        for fill in range(1, 6):
            easydist.wait_for_everyone()
            for value in trained.values():
                value.fill_(fill)
            member.publish()
        return
    mine = net(0)
    member, steps, seen = WeightReceiver(mine), [], set()

    async def serve():
        while member.version < 5:
            seen.add(tuple(sorted({value.flatten()[0].item() for value in mine.state_dict().values()})))
            steps.append(member.version)
            await asyncio.sleep(0)

    async def update():
        for version in range(1, 6):
            await asyncio.to_thread(easydist.wait_for_everyone)
            assert await member.areceive(timeout=60) == version

    async def both():
        await asyncio.gather(serve(), update())

    asyncio.run(both())
    assert len(steps) > 5
    assert all(len(values) == 1 for values in seen), seen  # never a mixture


@distributed(world_size=2)
def test_coroutines_that_receive_at_the_same_time_take_turns(rank):
    """One would be an error on this rank alone, and the others would wait for it until their time is over."""
    if rank == 0:
        member = WeightPublisher(state(1))
        assert [member.publish() for _ in range(3)] == [1, 2, 3]
        return
    member = WeightReceiver(net(0))

    async def update():
        return await asyncio.gather(*[member.areceive(timeout=60) for _ in range(3)])

    assert asyncio.run(update()) == [1, 2, 3]


@pytest.mark.parametrize("as_task", [False, True])
@distributed(world_size=2)
def test_an_error_names_the_line_that_awaits(as_task, rank):
    """The stack of the thread in which the version arrives begins in the standard library, as that of a task does."""

    async def update():
        coming = WeightReceiver().areceive()
        await (asyncio.create_task(coming) if as_task else coming)

    with pytest.raises(DisagreementError, match=r"rank 1: +publish.* at tests/weights/test_versions.py:\d+"):
        easydist.gather(1) if rank == 0 else asyncio.run(update())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "dict", "state"])
@distributed(world_size=2)
def test_an_engine_in_inference_mode_receives_in_a_thread(kind, rank):
    """The mode belongs to a thread, so memory that was made in it could not be written in another thread."""
    if rank == 0:
        member = WeightPublisher(trained := state(0))
        for fill in (1, 2, 3, 4):
            for value in trained.values():
                value.fill_(fill)
            member.publish(changed=["0.weight", "1.num_batches_tracked"] if fill == 4 else None)
        return
    with torch.inference_mode():
        member = WeightReceiver(mine := {"module": net(0), "dict": state(0), "state": None}[kind])
        assert member.receive() == 1
        assert asyncio.run(member.areceive()) == 2
    assert member.receive() == 3
    assert member.receive() == 4
    got = dict(mine.state_dict()) if kind == "module" else member.state
    assert_same(got, {**state(3), **{name: state(4)[name] for name in ("0.weight", "1.num_batches_tracked")}})


@pytest.mark.slow
@distributed(world_size=3)
def test_an_engine_serves_while_regroup_brings_a_version(rank):
    pair, mine = dist.new_group([0, 1]), [None, None, net(0)][rank]
    member = (
        WeightPublisher(state(1), group=pair) if rank == 0 else WeightReceiver(mine, group=(None, pair, None)[rank])
    )
    if rank < 2:
        member.publish() if rank == 0 else member.receive()
    world = dist.group.WORLD
    assert member.regroup(world, commit=False) == 1
    assert (member.version, getattr(member, "arrived", None)) == [(1, None), (1, None), (0, 1)][rank]
    if rank == 2:
        assert_same(dict(mine.state_dict()), state(0))
        assert member.commit() == 1
        assert_same(dict(mine.state_dict()), state(1))
    again = asyncio.run(member.aregroup(world)) if rank else member.regroup(world)
    assert again == member.version == 1
    if rank == 2:
        member = WeightReceiver(mine := net(0))
        assert asyncio.run(member.aregroup(world)) == member.version == 1
        assert_same(dict(mine.state_dict()), state(1))
    else:
        member.regroup(world)


@pytest.mark.slow
@distributed(world_size=3)
def test_an_engine_serves_while_share_brings_a_version(rank):
    first, pair, everyone = dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group()
    mine = net(0)
    member = WeightPublisher(state(1), group=first) if rank == 0 else WeightReceiver(mine, group=pair)
    if rank < 2:
        assert (member.regroup(first), member.publish() if rank == 0 else member.receive()) == (0, 1)
    if rank:
        assert member.share(pair, commit=False) == 1
        assert (member.version, member.arrived) == [(1, None), (0, 1)][rank - 1]
        assert_same(dict(mine.state_dict()), state(rank == 1))
        assert rank == 1 or member.commit() == 1
    assert member.regroup(everyone, src=0) == member.version == 1
    assert rank == 0 or assert_same(dict(mine.state_dict()), state(1)) is None


@distributed(world_size=2)
def test_a_version_that_came_after_its_task_was_cancelled_does_not_stop_the_next_one(rank):
    member = WeightPublisher(state(1)) if rank == 0 else WeightReceiver()
    if rank == 0:
        member.publish()
        member.publish()
    else:
        member.arrive()  # the thread of that task has done so
        assert asyncio.run(member.areceive()) == member.version == 2
        assert member.arrived is None


@pytest.mark.slow
@distributed(world_size=3)
def test_a_sharded_trainer_publishes(rank):
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    values = torch.arange(20.0).view(5, 4)
    if rank < 2:
        member = WeightPublisher({"w": distribute_tensor(values, mesh, [Shard(0)])}, src=[0, 1])
        assert (member.publish(), member.publish()) == (1, 2)
    else:
        member = WeightReceiver(src=[0, 1])
        assert (member.receive(), member.receive()) == (1, 2)
        assert_same(member.state, {"w": values})
    with pytest.raises(RemoteError, match="rank 1: ValueError: this rank publishes version 52, the first source"):
        member.publish(51 + rank) if rank < 2 else member.receive()
    assert member.version == 2
    assert (member.publish(53) if rank < 2 else member.receive()) == 53


@pytest.mark.slow
@distributed(world_size=4)
def test_a_member_of_a_sharded_engine_is_replaced(rank):
    """Rank 0 trains, ranks 1 and 2 serve halves; then rank 3 serves in place of rank 2."""
    from torch.distributed.tensor import DeviceMesh, Shard

    engine, renewed = (DeviceMesh("cpu", ranks, _init_backend=False) for ranks in ([1, 2], [1, 3]))
    values, before = torch.arange(24.0).view(6, 4), dist.new_group([0, 1, 2])
    after, everyone = dist.new_group([0, 1, 3]), dist.new_group()

    def shard(mesh, at):
        return {"w": DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], run_check=False), "at": torch.tensor(at)}

    trained = {"w": values.clone(), "at": torch.tensor(7)}
    mine = trained if rank == 0 else shard(renewed if rank == 3 else engine, 0)
    member = WeightPublisher(trained, group=before) if rank == 0 else None
    if rank in (1, 2):
        member = WeightReceiver(mine, group=before)
    if rank < 3:
        assert (member.publish() if rank == 0 else member.receive()) == 1
    whole = WeightReceiver() if rank == 3 else member
    trained["w"] += 100  # the trainer goes on

    # While both halves are there, they are the source of a new member, and the publisher is not asked.
    assert whole.regroup(everyone, src=0) == 1
    if rank == 3:
        assert_same(whole.state, {"w": values, "at": torch.tensor(7)})

    # One half alone is no source: all receivers get the weights of the publisher.
    if rank == 2:
        return
    member = WeightReceiver(mine, group=after) if rank == 3 else member
    assert member.regroup(after, group_src=0) == 1
    if rank:
        half = values[:3] if rank == 1 else values[3:]
        assert_same(mine["w"].to_local(), half + 100)
    assert (member.publish() if rank == 0 else member.receive()) == 2


@pytest.mark.slow
@distributed(world_size=3)
def test_a_receiver_may_hold_nothing_of_a_small_parameter(rank):
    """FSDP2 over two ranks leaves the second one without any part of a layer with one output."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DeviceMesh

    mesh, net = DeviceMesh("cpu", [0, 1]), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    if rank < 2:
        fully_shard(net, mesh=mesh)
    else:
        with torch.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.fill_(i + 1)

    def received():
        return [value.full_tensor().unique().tolist() for value in net.state_dict().values()] if rank < 2 else None

    weights.broadcast_state_dict(net, 2)
    assert rank == 2 or received() == [[1], [2], [3], [4]]
    if rank == 2:
        with torch.no_grad():
            net[0].weight.fill_(5)
        WeightPublisher(net, src=2).publish()
    else:
        WeightReceiver(net, src=2).receive()
        assert received() == [[5], [2], [3], [4]]


def test_a_receiver_on_the_meta_device_is_refused():
    with pytest.raises(ValueError, match="to_empty"):
        WeightReceiver(nn.Linear(2, 2, device="meta"))
    assert weights.WeightReceiver(None).state is None


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), nn.LazyLinear(2).weight])
def test_a_receiver_that_is_not_dense_is_refused(value):
    with pytest.raises(TypeError, match=r"\['w'\] is not "):
        WeightReceiver({"w": value})


def test_a_receiver_that_commit_could_not_write_is_refused():
    flat = torch.zeros(8)
    with pytest.raises(ValueError, match=r"\['w'\] is an expanded tensor whose elements share memory"):
        WeightReceiver({"w": torch.zeros(1).expand(4)})
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] share memory"):
        WeightReceiver({"a": flat[:5], "b": flat[4:]})
    WeightReceiver({"a": flat[:4], "b": flat[4:], "tied": flat[:4]})
