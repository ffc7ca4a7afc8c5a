"""Object collectives: the page's own examples, and faults that all ranks hear of."""

import datetime
import pickle

import pytest
import torch
from launching import within

from easydist.comms import new_comm, objcol
from easydist.testing import distributed

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "shm"])


def made(backend):
    return new_comm(backend, CPU, "objects", timeout=datetime.timedelta(seconds=within(30)))


class Own:
    """Not allow-listed."""


class Unreadable:
    def __reduce__(self):
        raise ValueError("\udcff.txt is lost")


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_the_examples_of_the_page_run(rank, backend):
    comm = made(backend)
    gather_objects = ["foo", 12, {1: 2}]

    output = [None for _ in gather_objects]
    objcol.all_gather_object(comm, output, gather_objects[comm.get_rank()])
    assert output == gather_objects

    output = [None for _ in gather_objects]
    objcol.gather_object(comm, gather_objects[comm.get_rank()], output, root=0)
    assert output == (gather_objects if rank == 0 else [None] * 3)

    objects = ["foo", 12, {1: 2}] if comm.get_rank() == 0 else [None, None, None]
    objcol.broadcast_object_list(comm, objects, src=0, device=CPU)
    assert objects == gather_objects

    objects = ["foo", 12, {1: 2}] if comm.get_rank() == 0 else [None, None, None]
    output_list = [None]
    objcol.scatter_object_list(comm, output_list, objects, root=0)
    assert output_list == [gather_objects[rank]]

    if rank == 0:
        objcol.send_object_list(comm, gather_objects, dst=1)
    elif rank == 1:
        objects = [None, None, None]
        objcol.recv_object_list(comm, objects, src=0)
        assert objects == gather_objects

    # and with the signatures of the page
    output = [None] * 3
    objcol.gather_object(comm, rank, 1, output if rank == 1 else None)
    assert output == ([0, 1, 2] if rank == 1 else [None] * 3)
    objcol.broadcast_object_list(comm, objects := [rank, torch.arange(rank)], 2)
    assert objects[0] == 2
    assert objects[1].tolist() == [0, 1]
    objcol.scatter_object_list(comm, 2, output_list, [10, 11, 12] if rank == 2 else None)
    assert output_list == [10 + rank]
    objcol.broadcast_object_list(comm, [], 0)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_a_fault_of_one_rank_is_raised_on_all_and_the_communicator_works_on(rank, backend):
    comm, none = made(backend), [None] * 3
    bad = Own() if rank == 1 else 5
    cases = [
        (lambda: objcol.all_gather_object(comm, none[rank == 2 :], rank), 2, RuntimeError, "has 2 elements, but there"),
        (lambda: objcol.gather_object(comm, rank, 2), 2, RuntimeError, "Must provide object_gather_list on root rank"),
        (lambda: objcol.all_gather_object(comm, none, bad), 1, pickle.UnpicklingError, "Weights only load failed.*Own"),
        (lambda: objcol.gather_object(comm, bad, 0, none), 1, pickle.UnpicklingError, "Weights only load failed.*Own"),
        (lambda: objcol.broadcast_object_list(comm, [bad], 1), 1, pickle.UnpicklingError, "Weights only load failed"),
        (
            lambda: objcol.scatter_object_list(comm, 1, [None], [bad] * 3),
            1,
            pickle.UnpicklingError,
            "Weights only load failed",
        ),
        (lambda: objcol.scatter_object_list(comm, 0, [None] * (rank != 2), none), 2, ValueError, "at least 1"),
        (
            lambda: objcol.scatter_object_list(comm, 0, [None], None),
            0,
            ValueError,
            "non-None scatter_object_input_list",
        ),
        (lambda: objcol.scatter_object_list(comm, 0, [None], [1]), 0, ValueError, "has 1 elements for 3 ranks"),
        (lambda: objcol.all_gather_object(comm, none, lambda: 0, weights_only=False), rank, TypeError, "pickle"),
        (lambda: objcol.all_gather_object(comm, (0,) * 3 if rank == 1 else none, 5), 1, TypeError, "a list, got tuple"),
        (lambda: objcol.gather_object(comm, 5, 1, 5 if rank == 1 else None), 1, TypeError, "a list, got int"),
        (
            lambda: objcol.broadcast_object_list(comm, None if rank == 1 else [5], 0),
            1,
            TypeError,
            "a list, got NoneType",
        ),
        (lambda: objcol.broadcast_object_list(comm, 5 if rank == 0 else [5], 0), 0, TypeError, "a list, got int"),
        (lambda: objcol.scatter_object_list(comm, 0, [None], "abc"), 0, TypeError, "a list, got str"),
        (
            lambda: objcol.all_gather_object(comm, none, Unreadable() if rank == 1 else 5, weights_only=False),
            1,
            ValueError,
            "udcff.txt is lost" if rank != 1 else "is lost",
        ),
    ]
    for call, culprit, kind, text in cases:
        with pytest.raises(kind if rank == culprit else RuntimeError, match=text):
            call()
    with pytest.raises(RuntimeError, match=r"lists have \[2, 3, 4\] elements"):
        objcol.broadcast_object_list(comm, [None] * (rank + 2), 0)
    with pytest.raises(RuntimeError, match=r"lists have \[2, 3, 2\] elements"):
        objcol.broadcast_object_list(comm, [None] * (2 + rank % 2), 0)
    with pytest.raises(RuntimeError, match="root must be in range"):
        objcol.gather_object(comm, 1, 3)

    # between two ranks
    if rank == 0:
        with pytest.raises(RuntimeError, match="sender's list has 2 elements, the receiver's 3"):
            objcol.send_object_list(comm, [1, 2], 1)
        with pytest.raises(pickle.UnpicklingError, match=r"Weights only load failed"):
            objcol.send_object_list(comm, [Own()], 1)
        with pytest.raises(TypeError, match="object_list has to be a list, got int"):
            objcol.send_object_list(comm, 5, 1)
        with pytest.raises(RuntimeError, match="the receiver's object_list is no list"):
            objcol.send_object_list(comm, [5], 1)
        objcol.send_object_list(comm, [Own()], 1)
        objcol.send_object_list(comm, [], 1)
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 failed: RuntimeError: .*2 elements, the receiver's 3"):
            objcol.recv_object_list(comm, [0] * 3, 0)
        with pytest.raises(RuntimeError, match=r"rank 0 failed: WeightsOnlyError"):
            objcol.recv_object_list(comm, [0], 0)
        with pytest.raises(objcol.RemoteFault, match=r"rank 0 failed: TypeError: .*has to be a list") as caught:
            objcol.recv_object_list(comm, [0], 0)
        assert caught.value.rank == 0
        with pytest.raises(TypeError, match="object_list has to be a list, got tuple"):
            objcol.recv_object_list(comm, (0,), 0)
        objcol.recv_object_list(comm, received := [0], 0, weights_only=False)
        assert type(received[0]) is Own
        objcol.recv_object_list(comm, [], 0)
    objcol.all_gather_object(comm, none, Own(), weights_only=False)
    assert [type(value) for value in none] == [Own] * 3
