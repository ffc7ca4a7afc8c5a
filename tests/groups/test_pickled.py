"""Pickles and copies of what belongs to a process stand for the same object there: communicators, coordinators, …"""

import copy
import pickle

import pytest
import torch

from easydist.comms import ReduceOp, new_comm
from easydist.parallel import parallel_groups
from easydist.testing import default_pool, distributed
from easydist.weights import Resharding, WeightPublisher, WeightReceiver


@distributed(world_size=2)
def test_in_the_same_process_they_are_the_same_object(rank):
    comm = new_comm("shm", torch.device("cpu"), "pickled")
    window = comm.window_allocate(64)
    for one in (comm, window, comm.new_window(), comm.batch_op_create()):
        assert pickle.loads(pickle.dumps(one)) is one
        assert copy.copy(one) is copy.deepcopy([one])[0] is one
    module = torch.nn.Linear(2, 2)
    module.comm = comm
    total = torch.ones(2)
    copy.deepcopy(module).comm.all_reduce(total, ReduceOp.SUM, async_op=False)
    assert total.tolist() == [2, 2]
    comm.finalize()


@distributed(world_size=2)
def test_a_model_is_copied_with_its_group_and_its_receiver(rank):
    model = torch.nn.Linear(2, 2)
    weights = {"w": torch.ones(2)}
    groups = parallel_groups(tp=2)
    held = [groups.tp, Resharding(weights, {"w": torch.zeros(2)})]
    held.append(WeightReceiver(model) if rank else WeightPublisher(model))
    module = torch.nn.Module()
    module.held = held
    assert [one is other for one, other in zip(copy.deepcopy(module).held, held, strict=True)] == [True] * 3
    assert copy.deepcopy(groups).tp is groups.tp
    groups.destroy()


def pickled(rank, world_size):
    return pickle.dumps(new_comm("shm", torch.device("cpu"), "gone"))


def test_elsewhere_an_error_names_the_process():
    with pytest.raises(RuntimeError, match=r"this TorchComm belongs to process \d+ on .*: make one here"):
        pickle.loads(default_pool().run(pickled, 1)[0])
