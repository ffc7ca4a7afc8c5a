"""Tests of memory for large results: equal to torch.empty's, reused once it is free, and never before."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import easydist
from easydist import memory
from easydist.testing import distributed

LARGE = 1 << 20
ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not memory._HAS_HUGE_PAGES, reason="needs Linux")


@pytest.fixture(autouse=True, scope="module")
def settled():
    """Freeze existing objects, so that these tests do not scan them again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()
    memory.release()
    assert memory._kept() == 0


@pytest.mark.parametrize("shape", [(LARGE,), (3, 7, LARGE // 8), (LARGE + 1,), (5 * LARGE,), (2, 0), (), (3,)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex128], ids=str
)
def test_tensors_are_what_torch_empty_gives(dtype, shape):
    got, want = memory.empty(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (got.dtype, got.shape, got.stride(), got.device) == (want.dtype, want.shape, want.stride(), want.device)
    assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()  # torch.save writes no more than that
    assert not got._is_view()
    assert got.is_leaf
    assert not got.requires_grad
    got.view(torch.uint8).zero_() if got.ndim else got.zero_()


def test_memory_is_used_again_once_nobody_holds_it():
    first = memory.empty([LARGE], torch.float32)
    place = first.data_ptr()
    view, array = first[5:7], first.numpy()
    del first
    assert memory.empty([LARGE], torch.float32).data_ptr() != place, "a view holds it"
    del view
    assert memory.empty([LARGE], torch.float32).data_ptr() != place, "an array holds it"
    del array
    assert place in {memory.empty([LARGE], torch.int32).data_ptr()}


def test_sizes_that_are_close_share_memory():
    place = memory.empty([LARGE + 5], torch.uint8).data_ptr()
    assert memory.empty([LARGE + 1000], torch.uint8).data_ptr() == place


def test_a_large_result_begins_on_a_huge_page():
    assert memory.empty([4 * LARGE], torch.uint8).data_ptr() % (2 * LARGE) == 0


def test_what_is_kept_has_a_limit(monkeypatch):
    monkeypatch.setattr(memory, "_KEPT", 3 * LARGE)
    held = [memory.empty([LARGE], torch.uint8) for _ in range(5)]
    del held
    assert memory._kept() == 3 * LARGE
    memory.empty([2 * LARGE], torch.uint8)
    assert memory._kept() == 2 * LARGE, "what is of other sizes has gone"
    memory.empty([4 * LARGE], torch.uint8)
    assert memory._kept() == 0, "what is larger than the limit is not kept"


def test_memory_is_not_kept_while_the_interpreter_ends():
    lent = memory._lent(LARGE)
    lent.__del__(is_finalizing=lambda: True)
    assert memory._kept() == 0
    lent.memory = None  # so that its end gives nothing back
    lent = memory._lent(LARGE)
    del lent
    assert memory._kept() == LARGE


def test_tensors_may_end_in_any_thread():
    def work():
        for i in range(200):
            tensor = memory.empty([LARGE + (i % 3) * LARGE], torch.uint8)
            tensor[0] = i % 256
            assert tensor[0] == i % 256

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory._kept() <= memory._KEPT


@distributed(world_size=2)
def test_a_verb_that_is_called_again_needs_no_new_memory(rank):
    tree = {"a": torch.full((LARGE,), rank), "b": torch.full((2, LARGE), rank, dtype=torch.uint8)}

    def places():
        got = {**easydist.gather(tree), "total": easydist.reduce(tree["b"], "max")}
        assert got["a"][-1] == 1
        assert got["b"][0, 0] == 0
        assert got["total"][0, 0] == 1
        return {name: tensor.data_ptr() for name, tensor in got.items()}

    first = places()
    assert places() == first
    kept = easydist.gather(tree)
    before = {name: tensor.clone() for name, tensor in kept.items()}
    places()
    assert all(torch.equal(kept[name], before[name]) for name in kept)


KEPT = """
import sys, easydist, torch

first, kept, third, fourth = (easydist.gather(torch.ones(1 << 20)) for _ in range(4))
torch.kept = [fourth, first, first.numpy()]
sys.kept = third[5:]
"""


@pytest.mark.slow
def test_results_that_live_until_the_end_end_in_silence():
    """Test it even if a result outlives the names of easydist's modules."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "")
