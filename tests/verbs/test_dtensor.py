"""DTensors, of which each rank has a part: verbs refuse them everywhere, and say what to pass."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import easydist
from easydist import RemoteError
from easydist.testing import distributed

SHARD, PARTIAL, REPLICATE = "shard", "partial", "replicate"


def dtensor(kind):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if kind == PARTIAL:
        return DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0) if kind == SHARD else Replicate()])


def only_first(tree):
    return tree if torch.distributed.get_rank() == 0 else None


VERBS = {
    "gather": easydist.gather,
    "gather to one": lambda tree: easydist.gather(tree, dst=0),
    "reduce": easydist.reduce,
    "broadcast": easydist.broadcast,
    "broadcast to None": lambda tree: easydist.broadcast(only_first(tree)),
    "copy_tensor_to_devices": lambda tree: easydist.copy_tensor_to_devices(only_first(tree)),
    "scatter": easydist.scatter,
    "all_to_all": easydist.all_to_all,
    "pad_across_processes": easydist.pad_across_processes,
    "broadcast_tensor_dict": lambda tree: easydist.broadcast_tensor_dict(only_first(tree)),
    "tensor dicts in a pair": lambda tree: (
        easydist.recv_tensor_dict(0) if only_first(tree) is None else easydist.send_tensor_dict(tree, 1)
    ),
    "gather_object": lambda tree: easydist.gather_object([tree]),
    "gather_object of weights": lambda tree: easydist.gather_object(tree, weights_only=True),
    "broadcast_object_list": lambda tree: easydist.broadcast_object_list([tree]),
    "scatter_object_list": lambda tree: easydist.scatter_object_list([None], [tree] * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SHARD, PARTIAL, REPLICATE])
@distributed(world_size=2)
def test_all_verbs_refuse_them_on_all_ranks(rank, kind):
    tree = {"norm": dtensor(kind), "loss": torch.ones(1)}
    for verb in VERBS.values():
        with pytest.raises((TypeError, RemoteError), match=r"\.full_tensor\(\)"):
            verb(tree)
    assert easydist.gather(1).tolist() == [1, 1]


@distributed(world_size=2)
def test_one_on_a_single_rank_is_the_error_of_all(rank):
    leaf = dtensor(SHARD)
    for verb in ("gather", "reduce"):
        with pytest.raises(RemoteError, match=r"rank 1: TypeError: leaf \['x'\] is a DTensor; pass \.full_tensor\(\)"):
            getattr(easydist, verb)({"x": leaf if rank else torch.ones(2, 2)})


@distributed(world_size=2)
def test_what_the_text_says_to_pass_is_taken(rank):
    shard, partial = dtensor(SHARD), dtensor(PARTIAL)
    assert easydist.reduce({"x": partial.full_tensor()}, "max")["x"].tolist() == [2.0, 2.0]
    assert torch.equal(easydist.gather(shard.to_local()), shard.full_tensor())


@distributed(world_size=2)
def test_save_refuses_them(rank, tmp_path):
    with pytest.raises(TypeError, match=r"\.full_tensor\(\)"):
        easydist.save({"x": dtensor(SHARD)}, tmp_path / f"{rank}.safetensors")
    assert not list(tmp_path.iterdir())
