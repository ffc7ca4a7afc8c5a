"""publish(changed=…): only the named entries travel, and every receiver has the whole version."""

import pytest
import torch
from counting import recorded
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from trees import assert_same

from easydist import RemoteError
from easydist.testing import distributed
from easydist.weights import WeightPublisher, WeightReceiver

LARGE = 1 << 18


def start():
    tied = torch.zeros(5)
    return {"large": torch.zeros(LARGE), "w": torch.zeros(3, 4), "b": torch.zeros(4), "tied": tied, "same": tied}


@pytest.mark.slow
@distributed(world_size=4)
def test_only_what_has_changed_travels(rank):
    """Rank 1 has a dict of its own, rank 2 takes new tensors, rank 3 streams."""
    sent, mine, loaded = {**start(), "step": 0}, {**start(), "step": 0}, {}
    member = WeightPublisher(sent) if rank == 0 else WeightReceiver(mine if rank == 1 else None)

    def step(fill, *changed):
        """Publish; return the names that rank 3 gets."""
        names = changed or list(sent)
        for name in names:
            sent[name] = fill if name == "step" else sent[name].fill_(fill)
        if rank == 3:
            loaded.update(came := dict(member.stream()))
            return sorted(came)
        if rank == 0:
            member.publish(changed=changed or None)
        else:
            member.receive()
            assert_same(mine if rank == 1 else member.state, sent)
        return None

    def came(*names):
        return sorted(names) if rank == 3 else None

    everything = came(*sent)
    assert step(1.0, "w") == everything  # there is no version yet
    with recorded() as operations:
        assert step(2.0, "b") == came("b", "step")
    assert [kind for kind, _ in operations].count("broadcast") == 1  # all entries take two
    assert step(3.0, "w", "tied") == came("same", "step", "tied", "w")
    assert step(4.0, "step") == came("step")
    assert step(5.0, "b") == came("b", "step")
    assert rank != 3 or assert_same({name: loaded[name] for name in sent}, sent) is None
    kept = member.state["w"] if rank == 2 else None
    assert step(6.0) == everything
    assert step(7.0, "w") == came("step", "w")
    assert rank != 2 or kept.eq(7).all()  # two copies take turns

    # A receiver that lacks the version before gets all of it, but the others do not.
    if rank == 2:
        member = WeightReceiver()
    assert step(8.0, "large") == came("large", "step")
    assert step(9.0, "large", "w") == came("large", "step", "w")


@pytest.mark.slow
@distributed(world_size=2)
def test_an_entry_in_whose_memory_another_one_stays_changes_nothing(rank):
    """Tied on the receiver, apart on the publisher: whatever has changed, it is the last one that counts."""
    sent, one = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}, torch.zeros(3)
    mine = {"b": one, "c": torch.zeros(3), "a": one}
    member = WeightPublisher(sent) if rank == 0 else WeightReceiver(mine)
    for fill, changed in enumerate([None, ["b"], ["a"], ["b", "c"], ["a", "b"], ["b"], None, ["c"]], 1):
        for name in changed or sent:
            sent[name].fill_(10 * fill + ord(name) - ord("a"))
        if rank == 0:
            member.publish(changed=changed)
        else:
            member.receive()
            assert_same({name: mine[name] for name in "abc"}, {"a": sent["a"], "b": sent["a"], "c": sent["c"]})


@pytest.mark.slow
@distributed(world_size=3)
def test_a_version_that_failed_leaves_nothing_in_the_next_one(rank):
    """Rank 1 has a model, rank 2 takes new tensors, and fails when it has all of a version."""
    mine = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    sent = {name: torch.zeros_like(value) for name, value in mine.state_dict().items()}
    member = WeightPublisher(sent) if rank == 0 else WeightReceiver(mine if rank == 1 else None)

    def step(changed=None):
        if rank == 0:
            return member.publish(changed=changed)
        member.arrive()
        assert_same(dict(member.weights()), sent)  # of the version that waits for commit: regroup would send it
        return member.commit()

    def fail(room, manifest):
        raise ConnectionError("lost")

    step()
    for i, changed in enumerate((None, ["1.weight", "1.bias"])):
        for name in changed or sent:
            sent[name].fill_(5.0)
        if rank == 2:
            member.fill = fail
        with pytest.raises(ConnectionError if rank == 2 else RemoteError, match="lost"):
            step(changed)
        if rank == 2:
            del member.fill
        for value in sent.values():
            value.zero_()
        sent["0.bias"].fill_(i)
        assert step(["0.bias", "1.bias"]) is not None
        sent["0.weight"].fill_(i)
        step(["0.weight"])
        assert rank != 1 or assert_same(dict(mine.state_dict()), sent) is None
        sent["0.weight"].zero_()
        step(["0.weight"])


@pytest.mark.slow
@distributed(world_size=2)
def test_versions_of_other_entries_arrive_without_a_model(rank):
    """The memory of the version before the last one is for other names, shapes, dtypes or ties."""
    tied, sent = torch.zeros(5), {}
    member = WeightPublisher(sent) if rank == 0 else WeightReceiver()

    def step(entries, changed=None):
        sent.clear()
        sent.update(entries)
        member.publish(changed=changed) if rank == 0 else member.receive()
        assert rank == 0 or assert_same(member.state, sent) is None

    first = {"w": torch.zeros(3), "b": torch.zeros(2), "tied": tied, "same": tied}
    others = {
        "names": {**first, "new": torch.ones(1)},
        "shape": {**first, "w": torch.ones(4)},
        "dtype": {**first, "w": torch.ones(3, dtype=torch.bfloat16)},
        "ties": {**first, "same": torch.ones(5)},
        "no tensor": {**first, "w": 3},
        "fewer": {"b": torch.ones(2)},
    }
    for other in others.values():
        for entries in (first, first, other, other, other, first):
            step(entries)
        step(other, ["b"])  # all of it travels
        step(other, ["b"])
        step(first)
        step(other)


@pytest.mark.slow
@distributed(world_size=3)
def test_names_that_are_not_published_are_refused_everywhere(rank):
    publisher = {"model.w": torch.ones(2), "model.b": torch.ones(2), "rest": torch.ones(2)}
    options = {"filter": lambda name: name != "rest", "rename": lambda name: name.removeprefix("model.")}
    member = WeightPublisher(publisher, **options) if rank == 0 else WeightReceiver()

    def refused(changed, match):
        with pytest.raises(RemoteError, match=match):
            member.publish(changed=changed) if rank == 0 else member.receive()

    assert (member.publish() if rank == 0 else member.receive()) == 1
    refused(["w", "rest", "model.b"], "ValueError: changed= contains 'rest', 'w', not among the published entries")
    refused("model.w", "TypeError: changed= takes a list of names, got 'model.w'")
    refused(5, "TypeError: changed= takes a list of names, got 5")
    refused([["model.w"]], "TypeError")
    publisher["model.w"].fill_(2)
    assert (member.publish(changed=["model.w"]) if rank == 0 else member.receive()) == 2
    assert (member.publish(changed=[]) if rank == 0 else member.receive()) == 3
    assert rank == 0 or assert_same(member.state, {"w": torch.full((2,), 2.0), "b": torch.ones(2)}) is None


@pytest.mark.slow
@distributed(world_size=3)
def test_a_sharded_trainer_publishes_what_has_changed(rank):
    mesh, values = DeviceMesh("cpu", [0, 1], _init_backend=False), torch.arange(12.0).view(4, 3)
    mine = {"w": torch.zeros(4, 3), "v": torch.zeros(4, 3)}

    def shards(add):
        return {name: distribute_tensor(values + add, mesh, [Shard(0)], src_data_rank=None) for name in ("w", "v")}

    state = shards(0) if rank < 2 else None
    member = WeightPublisher(state, src=[0, 1]) if rank < 2 else WeightReceiver(mine, src=[0, 1])
    assert (member.publish() if rank < 2 else member.receive()) == 1
    if rank < 2:
        state.update(shards(100))
    with pytest.raises(RemoteError, match="rank 1: ValueError: this rank passes other changed= than the first source"):
        member.publish(changed=["w", "v"][: 1 + rank]) if rank < 2 else member.receive()
    assert (member.publish(changed=["w"]) if rank < 2 else member.receive()) == 2
    if rank == 2:
        assert_same(mine, {"w": values + 100, "v": values})
