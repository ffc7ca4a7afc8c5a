import importlib
import random
import re
import sys

import numpy as np
import pytest
import torch

import easydist
from easydist import RemoteError
from easydist.testing import distributed


def draw():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@distributed(world_size=(1, 2, 3))
def test_one_seed_gives_all_ranks_the_same_numbers(rank, world_size):
    easydist.set_seed(5)
    assert easydist.gather_object(draw()) == [easydist.gather_object(None) and draw_after(5)] * world_size


def draw_after(seed):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return draw()


@pytest.mark.parametrize("seed", ["a", 1.5, None, [1]])
@distributed(world_size=2)
def test_a_seed_that_is_no_integer_is_an_error_and_seeds_nothing(rank, seed):
    easydist.set_seed(1)
    text = f"set_seed: seed={seed!r} is not a seed: pass an integer"
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        easydist.set_seed(seed, device_specific=True)
    with pytest.raises(ValueError, match=r"^set_seed: \d+ has more than 64 bits; choose a smaller seed$"):
        easydist.set_seed(2**64)
    assert draw() == draw_after(1)
    easydist.set_seed(np.int32(1))
    assert draw() == draw_after(1)


@distributed(world_size=3)
def test_device_specific_seeds_differ_by_the_rank_on_all_hosts(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        easydist.set_seed(5, device_specific=True)
    assert draw() == draw_after(5 + rank)


@distributed(world_size=3)
def test_a_seed_that_is_too_large_for_the_last_rank_is_an_error_on_all(rank):
    easydist.set_seed(1)
    with pytest.raises(ValueError, match=f"^set_seed: {2**64} has more than 64 bits; choose a smaller seed$"):
        easydist.set_seed(2**64 - 2, device_specific=True)
    assert draw() == draw_after(1)
    easydist.set_seed(2**64 - 3, device_specific=True)
    assert draw() == draw_after(2**64 - 3 + rank)


@distributed(world_size=1)
def test_deterministic_algorithms_can_be_asked_for(rank):
    try:
        easydist.set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@distributed(world_size=(1, 2, 3))
def test_states_become_those_of_rank_0(rank, world_size):
    easydist.set_seed(rank)
    easydist.synchronize_rng_states()
    assert len(set(easydist.gather_object(draw()))) == 1


@distributed(world_size=2)
def test_only_the_named_generators_change(rank):
    generator = torch.Generator().manual_seed(rank)
    easydist.set_seed(rank)
    easydist.synchronize_rng_states(["generator", "numpy"], generator)
    torch_numbers, numpy_numbers, _ = zip(*easydist.gather_object(draw()), strict=True)
    assert len(set(torch_numbers)) == 2
    assert len(set(numpy_numbers)) == 1
    assert len(set(easydist.gather_object(torch.rand(1, generator=generator).item()))) == 1


XLA = """
state = 0

def get_rng_state():
    return state

def set_rng_state(seed):
    global state
    state = seed
"""


@distributed(world_size=2)
def test_the_generator_of_xla_is_used_where_its_library_is_installed(rank, tmp_path):
    """A stand-in for the library, which runs where its hardware is: a module with the same two functions."""
    folder = tmp_path / f"{rank}" / "torch_xla" / "core"
    folder.mkdir(parents=True)
    (folder / "xla_model.py").write_text(XLA)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / f"{rank}"))
        easydist.synchronize_rng_states(["torch"])
        assert "torch_xla" not in sys.modules
        xla = importlib.import_module("torch_xla.core.xla_model")
        xla.set_rng_state(7 + rank)
        easydist.synchronize_rng_states(["torch", "xla"])
        assert xla.get_rng_state() == 7
        for name in [name for name in sys.modules if name.startswith("torch_xla")]:
            del sys.modules[name]


@distributed(world_size=2)
def test_an_unknown_generator_is_an_error_for_all_and_changes_nothing(rank):
    easydist.set_seed(rank)
    with pytest.raises(ValueError, match="no xla here; there is torch, numpy, python"):
        easydist.synchronize_rng_states(["torch", "xla"])
    with pytest.raises(RemoteError, match=r"rank 1: ValueError: .*no generator here.*pass generator= as well"):
        easydist.synchronize_rng_states(["generator"], torch.Generator() if rank == 0 else None)
    assert len(set(easydist.gather_object(draw()))) == 2
