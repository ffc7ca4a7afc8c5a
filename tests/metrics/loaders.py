"""Loaders of other packages, made for each rank as their users make them."""

import contextlib

import pytest
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """The numbers up to a limit, with no length."""

    def __init__(self, total):
        self.total = total

    def __iter__(self):
        return iter(range(self.total))


class Sized(Stream):
    def __len__(self):
        return self.total


@contextlib.contextmanager
def accelerate_state(rank, world_size):
    """Accelerate's state for the group that is there, as its launcher sets it up."""
    from accelerate.state import AcceleratorState, GradientState

    with pytest.MonkeyPatch.context() as patch:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        for name, value in (numbers | {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}).items():
            patch.setenv(name, str(value))
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def prepared(dataset, batch_size, *, order=None, shuffle=None, drop_last=False, **options):
    """A loader that a real Accelerator has prepared; ``order`` is that of the samples of a dataset with a length."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    loader = DataLoader(dataset, batch_size, shuffle, order, drop_last=drop_last)
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(loader)
