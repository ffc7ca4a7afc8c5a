"""Over an epoch, gather_for_metrics gives what one process gets: each sample once, in the sampler's order."""

import torch
from loaders import accelerate_state, prepared

from easydist import gather_for_metrics
from easydist.testing import distributed

ALL = (1, 2, 3, 4)


def rows(batch):
    """What a model makes of a batch: several columns, each telling which sample its rows are of."""
    numbers = [int(i) for i in batch]
    return {"x": torch.as_tensor(numbers, dtype=torch.float16), "id": [f"s{i}" for i in numbers], "n": numbers}


def whole(got):
    """The samples that the columns tell of, which have to be the same in each."""
    assert got["x"].dtype == torch.float16
    assert got["id"] == [f"s{int(i)}" for i in got["x"]]
    assert got["n"] == [int(i) for i in got["x"]]
    return got["n"]


def in_loop(batches, **options):
    """Gathered batch by batch."""
    return [i for batch in batches for i in whole(gather_for_metrics(rows(batch), **options))]


def after(loader, **options):
    """Gathered after the loop."""
    mine = [int(i) for batch in loader for i in batch]
    return whole(gather_for_metrics(rows(mine), **options))


@distributed(world_size=2)
def test_101_samples_of_a_prepared_loader(rank, world_size):
    with accelerate_state(rank, world_size):
        loader = prepared(range(101), 8)
        assert in_loop(loader) == list(range(101))
        assert after(loader) == list(range(101))
        assert in_loop(loader, loader=loader) == list(range(101))
