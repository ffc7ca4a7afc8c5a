"""Loops that began before easydist was imported, and loops with persistent workers; torchrun starts each rank."""

import os

import pytest
from torch.utils.data import DataLoader, DistributedSampler

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def loader(total, **options):
    sampler = DistributedSampler(range(total), SIZE, RANK, shuffle=False)
    return DataLoader(range(total), 2, sampler=sampler, **options)


def main():
    first, other, unseen = loader(11), loader(7), loader(9)
    kept = [int(i) for batch in unseen for i in batch]
    peeked = iter(other)
    next(peeked)
    got = []
    for batch in first:
        import torch

        import easydist

        got += easydist.gather_for_metrics(batch, loader=first).tolist()
    assert got == [*range(11)], got
    got = [i for batch in other for i in easydist.gather_for_metrics(batch, loader=other).tolist()]
    assert got == [*range(7)], got
    got = easydist.gather_for_metrics(torch.tensor(kept), loader=unseen).tolist()
    assert got == [*range(9)], got
    with pytest.raises(ValueError, match="it is not known whether they are the last"):
        easydist.gather_for_metrics(torch.tensor(kept[:2]), loader=unseen)
    kept_alive = loader(11, num_workers=1, persistent_workers=True)
    for _ in range(3):
        got = [i for batch in kept_alive for i in easydist.gather_for_metrics(batch, loader=kept_alive).tolist()]
        assert got == [*range(11)], got


if __name__ == "__main__":
    main()
