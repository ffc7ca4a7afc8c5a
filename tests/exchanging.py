"""Sending a tree from one rank to another."""

import torch

import easydist


def exchanged(rank, data, src=0, dst=1, **kwargs):
    """Send a tree from ``src`` to ``dst``. Return the received tree there, and None elsewhere."""
    if rank == src:
        easydist.send_tensor_dict(data, dst)
    return easydist.recv_tensor_dict(src, **kwargs) if rank == dst else None


def works_on(rank):
    """Make sure that the next call on the pair and on the group works."""
    got = exchanged(rank, {"ok": torch.ones(1)})
    assert rank == 0 or got["ok"].tolist() == [1]
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]
