"""The conformance battery passes right communicators and catches broken ones."""

import inspect
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist.comms import Gloo, ReduceOp, TorchComm, TorchWork
from easydist.testing import default_pool, reductions
from easydist.testing.cases import drawing
from easydist.testing.conformance import run_battery, solo
from easydist.transport.comm import Collectives

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


class Swapped(Gloo):
    """Gives the chunks in the opposite order."""

    def all_gather_single(self, output, data):
        return super().all_gather_single(output, data).followed_by(lambda: self._swap_chunks(output))

    def _swap_chunks(self, output):
        output.copy_(torch.cat(output.chunk(self.size)[::-1]) if output.numel() else output)
        return ()


class WrongRoot(Gloo):
    """Broadcasts from the rank after the root."""

    def broadcast(self, tensor, root):
        return super().broadcast(tensor, (root + 1) % self.size)


class Truncating(Gloo):
    """Loses the last byte of what is scattered."""

    def scatter(self, output, inputs, root):
        super().scatter(output, inputs, root).wait()
        output[-1:].zero_()
        return TorchWork()


class SumOnly(Gloo):
    """Sums whatever it is asked for."""

    def all_reduce(self, tensor, op):
        return super().all_reduce(tensor, ReduceOp.SUM)


class Garbling(Gloo):
    """Sends other values."""

    def send(self, tensor, dst):
        return super().send(tensor.fill_(77), dst)


class Impatient(Gloo):
    """Waits for nobody in a barrier."""

    def barrier(self):
        return TorchWork()


class Lenient(TorchComm):
    """Does not look whether a root exists."""

    def __init__(self, backend, name):
        super().__init__(backend, name)
        self.checks.rank = lambda what, rank: int(rank) % self.get_size()


def over_gloo(backend, comm=TorchComm):
    return comm(backend(dist.group.WORLD, torch.device("cpu"), "gloo"), backend.__name__)


def rank_of(rank):
    return rank


def right(rank, world_size):
    return over_gloo(Gloo)


def swapped(rank, world_size):
    return over_gloo(Swapped)


def wrong_root(rank, world_size):
    return over_gloo(WrongRoot)


def truncating(rank, world_size):
    return over_gloo(Truncating)


def sum_only(rank, world_size):
    return over_gloo(SumOnly)


def garbling(rank, world_size):
    return over_gloo(Garbling)


def impatient(rank, world_size):
    return over_gloo(Impatient)


def lenient(rank, world_size):
    return over_gloo(Gloo, Lenient)


FEW = (torch.int16, torch.float32)


def with_few_dtypes(make, rank, world_size):
    """Run the battery; the tests of communicators run it with all dtypes."""
    with drawing(*FEW), mock.patch.object(reductions, "REDUCED", FEW):
        run_battery(make, rank, world_size)


@pytest.mark.slow
def test_the_battery_passes_a_right_communicator():
    default_pool().run(with_few_dtypes, 2, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (swapped, "all_gather_single"),
        (wrong_root, "broadcast"),
        (truncating, "scatter"),
        (sum_only, "all_reduce"),
        (garbling, "send"),
        (impatient, "barrier"),
        (lenient, "misuse 5 was not refused"),
    ],
)
def test_the_battery_catches_a_broken_one(make, operation):
    with pytest.raises(ExceptionGroup) as caught:
        default_pool().run(with_few_dtypes, 2, make)
    assert any(isinstance(e, AssertionError) and str(e).startswith(operation) for e in caught.value.exceptions)
    assert default_pool().run(rank_of, 2) == [0, 1]


def tensors_of(arguments):
    """Return the tensors with elements in the arguments of an operation."""
    found, _ = easydist.tree.flatten(arguments)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.numel()]


def flipping(operation):
    """Return what makes a communicator of one rank whose operation leaves other bits in its tensors."""

    def make(rank, world_size):
        comm = solo(rank, world_size)
        right = getattr(comm, operation)

        def wrong(*args, **kwargs):
            work = right(*args, **kwargs)
            for tensor in tensors_of(list(args)):
                tensor.view(-1)[:1].view(torch.uint8).bitwise_not_()
            return work

        setattr(comm, operation, wrong)
        return comm

    return make


OPERATIONS = [
    name
    for name, method in inspect.getmembers(Collectives, inspect.isfunction)
    if "async_op" in inspect.signature(method).parameters and name not in ("barrier", "recv", "send")
]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_battery_looks_at_the_result_of_every_operation(operation):
    with pytest.raises(AssertionError, match=f"^{operation}[ :]"):
        with_few_dtypes(flipping(operation), 0, 1)
