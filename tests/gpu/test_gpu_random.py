"""Random trees on both kinds of device, with random verbs: what the same trees give on the CPU."""

import math
import random

import launching
import torch
from gpus import GPU, MIXED, ON_ANY, on_groups, outcome, to_cpu, use
from trees import DTYPES, assert_same

import easydist
from easydist import weights

pytestmark = ON_ANY

SEEDS = launching.examples(60)


def calls(rng, rank, world_size, dim):
    """Return verbs with random arguments, by name."""
    one, reduction = rng.randrange(world_size), rng.choice(["sum", "max", "min"])
    return {
        "gather": lambda x: easydist.gather(x, dim=dim),
        "gather to one": lambda x: easydist.gather(x, dim=dim, dst=one),
        "gather as list": lambda x: easydist.gather(x, as_list=True),
        "pad": lambda x: easydist.pad_across_processes(x, dim=dim),
        "gather objects": lambda x: easydist.gather_object([x]),
        "scatter": lambda x: easydist.scatter(x if rank == one else None, one, dim=dim),
        "all_to_all": lambda x: easydist.all_to_all(x, dim=dim),
        "broadcast": lambda x: easydist.broadcast(x, one),
        "broadcast a dict": lambda x: easydist.broadcast_tensor_dict(x if rank == one else None, one),
        "broadcast a state": lambda x: dict(weights.broadcast_state_dict(x if rank == one else None, src=one)),
        "reduce": lambda x: easydist.reduce(x, reduction),
        "reduce to one": lambda x: easydist.reduce(x, reduction, dst=one),
    }


def leaf(rng, rank, dim, factor, grows):
    """Return a tensor of any dtype, of 1 to 400 000 elements, dense or not."""
    shape = [rng.choice([1, 2, 3, 7]) for _ in range(rng.choice([1, 2, 2, 3]) if dim in (0, -1) else 2)]
    shape[rng.randrange(len(shape))] *= rng.choice([1, 10, 1000])
    shape[dim] = shape[dim] * factor + rng.randrange(4) * rank * grows
    shape = shape if math.prod(shape) <= 400_000 else [3 * factor] * len(shape)
    tensor = ((torch.arange(math.prod(shape)) * 3 + rank * 7) % 5).view(shape).to(rng.choice([*DTYPES]))
    return rng.choice(
        [
            tensor,
            tensor,
            tensor.transpose(0, -1).contiguous().transpose(0, -1),
            torch.stack([tensor, tensor], -1)[..., 0],
        ]
    )


def play(seed, rank, world_size):
    """Make one random call with a tree on the GPU and one on the CPU."""
    rng = random.Random(seed)
    dim = rng.choice([0, 0, 0, 1, -1])
    name, call = rng.choice([*calls(rng, rank, world_size, dim).items()])
    factor, grows = world_size if name in ("scatter", "all_to_all") else 1, rng.random() < 0.5 and name in UNEVEN
    data = {str(i): leaf(rng, rank, dim, factor, grows) for i in range(rng.choice([1, 2, 5, 20, 60]))}
    where = {key: GPU if rng.random() < 0.8 else "cpu" for key in data}
    there = outcome(lambda: call({key: value.to(where[key]) for key, value in data.items()}))
    here = outcome(lambda: call(data))
    if here is None or isinstance(here, str):
        assert there == here, (seed, name)
        return
    assert_same(to_cpu(there), to_cpu(here))
    if isinstance(there, dict):
        assert {key: value.device.type for key, value in there.items()} == where, (seed, name)


UNEVEN = ("gather", "gather to one", "gather as list", "pad", "gather objects", "broadcast a dict", "broadcast a state")


def check(rank, world_size, backend):
    use(backend)
    for seed in range(SEEDS):
        try:
            play(seed, rank, world_size)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@on_groups(("gloo", 2), (MIXED, 2), (MIXED, 3))
def test_random_calls(ranks, backend, world_size):
    ranks.run(check, world_size, backend=backend, timeout=600)
