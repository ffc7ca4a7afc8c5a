"""recv_object(src) on rank dst is a copy of what send_object(obj, dst) sent; both ranks raise, or neither does."""

import re
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from groups import BACKENDS, check_works, made

import easydist
from easydist.errors import DisagreementError, RemoteError
from easydist.testing import distributed


class Own:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def works_on(rank):
    """Make sure that the next call on the pair and on the group works."""
    if rank == 0:
        easydist.send_object({1, "ok"}, 1)
    if rank == 1:
        assert easydist.recv_object(0) == {1, "ok"}
    assert easydist.gather(rank).tolist() == [0, 1]


def both(rank, sending, receiving):
    """Return the text of the error that the call of either rank raises; the texts are equal."""
    with pytest.raises((RemoteError, DisagreementError)) as caught:
        sending() if rank == 0 else receiving()
    works_on(rank)
    error = caught.value
    texts = easydist.gather_object([f"{type(error).__name__}: {error}"])
    assert texts[0] == texts[1]
    if isinstance(error, RemoteError):
        assert f"\n  rank {error.rank}: " in str(error)
    return texts[0]


@BACKENDS
@pytest.mark.parametrize("numel", [3, 20_000, 1_000_000])
@distributed(world_size=3)
def test_any_object_arrives_on_that_rank(rank, backend, numel):
    tied = torch.arange(numel) + rank
    sent = [{"t": tied, "again": tied, "set": {1, 2}}, Own(Fraction(1, 3)), None, "text", float, ("a", [b"b"])]
    with made(backend) as group:
        check_works(group, backend)
        for src, dst in ((0, 1), (2, 0), (1, 2)):
            if rank == src:
                for obj in sent:
                    easydist.send_object(obj, dst, group=group)
            if rank == dst:
                first, *others = [easydist.recv_object(src, group=group) for _ in sent]
                assert torch.equal(first["t"], torch.arange(numel) + src)
                assert first["t"] is first["again"]
                assert first["set"] == {1, 2}
                assert others == sent[1:]
                first["t"].zero_()
        assert tied[-1] == numel - 1 + rank
        check_works(group, backend)


@distributed(world_size=2)
def test_both_ranks_hear_of_an_object_that_cannot_travel(rank):
    told = both(rank, lambda: easydist.send_object(threading.Lock(), 1), lambda: easydist.recv_object(0))
    assert "send_object: rank 0 failed before the exchange\n  rank 0: TypeError:" in told
    own = Own(1)
    told = both(
        rank,
        lambda: easydist.send_object(own, 1, weights_only=True),
        lambda: easydist.recv_object(0, weights_only=True),
    )
    assert "rank 0: easydist.errors.UnsafeObjectError" in told
    told = both(rank, lambda: easydist.send_object(own, 1), lambda: easydist.recv_object(0, weights_only=True))
    assert "recv_object: rank 1 cannot take what rank 0 sends\n  rank 1: easydist.errors.UnsafeObjectError" in told


@pytest.mark.parametrize("denying", [0, 1])
@distributed(world_size=2)
def test_both_ranks_hear_of_a_rank_that_denies_pickle(rank, denying):
    easydist.allow_pickle(rank != denying)
    try:
        with pytest.raises(
            RemoteError, match=f"rank {denying} .*\n  rank {denying}: .*UnsafeObjectError: pickle is denied"
        ):
            easydist.send_object(1, 1) if rank == 0 else easydist.recv_object(0)
        if rank == 0:
            easydist.send_object({"a": 1}, 1, weights_only=True)
        else:
            assert easydist.recv_object(0, weights_only=True) == {"a": 1}
    finally:
        easydist.allow_pickle(True)
    works_on(rank)


@pytest.mark.parametrize("size", [10, 100_000])
@distributed(world_size=2)
def test_objects_and_tensor_dicts_are_received_by_their_own_verbs(rank, size):
    data = {"x": torch.ones(size)}
    told = both(rank, lambda: easydist.send_object(data, 1), lambda: easydist.recv_tensor_dict(0))
    assert told == (
        "DisagreementError: recv_tensor_dict: rank 0 called send_object, rank 1 called recv_tensor_dict\n"
        "Call recv_object for what send_object sends."
    )
    told = both(rank, lambda: easydist.send_tensor_dict(data, 1), lambda: easydist.recv_object(0))
    assert told == (
        "DisagreementError: recv_object: rank 0 called send_tensor_dict, rank 1 called recv_object\n"
        "Call recv_tensor_dict for what send_tensor_dict sends."
    )
    said = "{0}: ranks 0 and 1 send to each other, and neither receives\nOne of the two has to call {1} first."
    told = both(rank, lambda: easydist.send_object(data, 1), lambda: easydist.send_object(data, 0))
    assert told == "DisagreementError: " + said.format("send_object", "recv_object")
    told = both(rank, lambda: easydist.send_object(data, 1), lambda: easydist.send_tensor_dict(data, 0))
    assert told == "DisagreementError: " + said.format("send_tensor_dict", "recv_tensor_dict")


@distributed(world_size=2)
def test_a_rank_that_is_no_other_rank_is_refused(rank):
    for other in (-1, 2, rank):
        said = re.escape(f"={other} is not another rank of the group, which has 2 ranks (0–1); this is rank {rank}")
        with pytest.raises(ValueError, match=f"^send_object: dst{said}"):
            easydist.send_object(1, other)
        with pytest.raises(ValueError, match=f"^recv_object: src{said}"):
            easydist.recv_object(other)
    works_on(rank)


@pytest.mark.parametrize("numel", [10, 3_000, 30_000])
@distributed(world_size=2)
def test_what_was_received_keeps_its_values_while_more_comes(rank, numel):
    sent = [torch.full((numel,), float(i)) for i in range(3)]
    if rank == 0:
        for tensor in sent:
            easydist.send_object(tensor, 1)
    else:
        got = [easydist.recv_object(0) for _ in sent]
        assert [tensor.unique().tolist() for tensor in got] == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("number", [np.int64, torch.tensor, int])
@distributed(world_size=2)
def test_the_other_rank_may_be_any_integer(rank, number):
    easydist.gather(rank)  # the ranks share memory from here on
    if rank == 0:
        easydist.send_tensor_dict({"x": torch.ones(1)}, number(1))
        easydist.send_object("a", group_dst=number(1))
    else:
        assert easydist.recv_tensor_dict(number(0))["x"].tolist() == [1]
        assert easydist.recv_object(group_src=number(0)) == "a"
    assert easydist.gather(rank).tolist() == [0, 1]
