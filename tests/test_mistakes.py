"""Mistakes that are easily made, and the texts that they get: what happened, where, and what to do."""

import launching
import pytest
import torch

import easydist
from easydist.errors import WireError
from easydist.testing import distributed

DATA = {"a": torch.ones(1)}
MISTAKES = {
    "a rank as text": (
        lambda: easydist.broadcast(DATA, from_process="0"),
        TypeError("from_process='0' is not a rank: pass an integer"),
    ),
    "a rank as a float": (
        lambda: easydist.gather(DATA, dst=0.0),
        TypeError("dst=0.0 is not a rank: pass an integer"),
    ),
    "a peer as text": (
        lambda: easydist.send_tensor_dict(DATA, dst="0"),
        TypeError("send_tensor_dict: dst='0' is not a rank: pass an integer"),
    ),
    "a modifier as text": (
        lambda: easydist.GatheredParameters([], modifier_rank="0").__enter__(),
        TypeError("modifier_rank='0' is not a rank: pass an integer"),
    ),
    "a rank that is not there": (
        lambda: easydist.broadcast(DATA, from_process=1),
        ValueError("from_process=1 is not a rank of the group, which has 1 rank (0)"),
    ),
    "oneself as the other rank": (
        lambda: easydist.recv_object(src=0),
        ValueError("recv_object: src=0 is not another rank of the group, which has 1 rank (0); this is rank 0"),
    ),
    "a generator": (
        lambda: easydist.gather_object(number for number in range(3)),
        TypeError("generator cannot be pickled: cannot pickle 'generator' object; pass a list of its values"),
    ),
    "torch's name": (
        lambda: easydist.all_gather,
        AttributeError(
            "module 'easydist' has no attribute 'all_gather'; use easydist.gather, of which every rank gets the result"
        ),
    ),
    "MPI's name": (
        lambda: easydist.barrier,
        AttributeError("module 'easydist' has no attribute 'barrier'; use easydist.wait_for_everyone"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_text(name):
    make, error = MISTAKES[name]
    with pytest.raises(type(error)) as caught:
        make()
    assert str(caught.value) == str(error)


def test_a_file_that_is_none(tmp_path):
    (path := tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WireError) as caught:
        easydist.load(path)
    assert str(caught.value) == f"{path}: 5 bytes are too few: the length of a safetensors header alone takes 8"


@pytest.mark.parametrize("name", sorted(easydist._ELSEWHERE))
def test_what_a_hint_names_is_there(name):
    assert not hasattr(easydist, name)
    for word in easydist._ELSEWHERE[name].replace(",", " ").replace("()", "").split():
        if word.startswith("easydist."):
            eval(word)


@distributed(world_size=2)
def test_a_rank_of_a_wrong_type_on_one_rank_is_an_error_on_all(rank):
    with pytest.raises(easydist.RemoteError, match="rank 1: TypeError: from_process='0' is not a rank"):
        easydist.broadcast(DATA, from_process="0" if rank else 0)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_without_cuda():
    world = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launching.free_port()}
    code = "import easydist; easydist.ProcessState(backend='nccl'); easydist.wait_for_everyone()"
    _, err = launching.forked("-c", code, status=1, **{name: str(value) for name, value in world.items()})
    assert "has no NCCL; install torch for CUDA, or leave backend= out, which means gloo on the CPU" in err
