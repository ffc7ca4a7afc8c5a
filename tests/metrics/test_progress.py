"""progress: one bar for the samples of all ranks, on the main process."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from easydist.metrics import distributed_loader, progress
from easydist.testing import default_pool, distributed


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def shown(loader, rank, desc="evaluate", **options):
    """The last state of the bar."""
    file = io.StringIO()
    batches = list(progress(loader, desc, file=file, mininterval=0, ascii=True, **options))
    assert bool(file.getvalue()) == (rank == 0)
    return batches, file.getvalue().strip().rpartition("\r")[2]


@distributed(world_size=(1, 3))
def test_the_samples_of_all_ranks_are_counted(rank, world_size):
    batches, text = shown(distributed_loader(range(7), 2), rank)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in distributed_loader(range(7), 2)]
    if rank == 0:
        assert text.startswith(f"evaluate on {world_size} rank{'s' * (world_size > 1)}: 100%")
        assert "7/7" in text


def write_to(terminal):
    """Evaluate with the standard error of this rank on a terminal."""
    with open(terminal, "w") as file, contextlib.redirect_stderr(file):
        assert file.isatty()
        list(progress(distributed_loader(range(7), 1), "evaluate", mininterval=0))


def test_a_terminal_of_all_ranks_has_one_bar():
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    try:
        default_pool().run(write_to, 3, os.ttyname(terminal))
        os.write(terminal, b"end")
        text = ""
        while not text.endswith("end"):
            text += os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
        os.close(terminal)
    states = text.removesuffix("end").strip().split("\r")
    assert all(state.startswith("evaluate on 3 ranks: ") for state in states if state)
    assert "7/7" in states[-1]
    assert (text.count("7/7"), text.count("\n")) == (1, 1)


@distributed(world_size=2)
def test_a_stream_has_no_total_unless_it_is_given(rank):
    _, text = shown(distributed_loader(Stream(), 2), rank)
    _, known = shown(distributed_loader(Stream(), 2), rank, total=7)
    if rank == 0:
        assert text.startswith("evaluate on 2 ranks: 7sample")
        assert "7/7" in known


@distributed(world_size=2)
def test_other_loaders_are_taken_to_be_alike_on_all_ranks(rank):
    _, text = shown(DataLoader(range(7), batch_size=2), rank, desc=None)
    _, unsized = shown(DataLoader(Stream(), batch_size=2), rank)
    _, plain = shown([torch.ones(2), "no tensor"], rank)
    if rank == 0:
        assert text.startswith("2 ranks: 100%")
        assert "7/7" in text
        assert unsized.startswith("evaluate on 2 ranks: 14sample")
        assert plain.startswith("evaluate on 2 ranks: 6sample")


@distributed(world_size=2)
def test_an_exception_in_the_loop_ends_the_bar(rank):
    def loop():
        for _ in progress(distributed_loader(range(7), 2), file=io.StringIO()):
            raise KeyError("in the loop")

    with pytest.raises(KeyError, match="in the loop"):
        loop()
