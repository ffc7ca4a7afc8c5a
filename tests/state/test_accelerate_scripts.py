"""Scripts that accelerate launches, and in which one line puts easydist in the places of accelerate's functions."""

import pytest
from test_launchers import SCRIPTS, accelerate, needs_mpich, worlds

pytestmark = [pytest.mark.slow, needs_mpich]


def rows(size):
    """Of every rank r those of ``arange(r + 1) + 10 r``."""
    return [10 * rank + i for rank in range(size) for i in range(rank + 1)]


def expected(rank, size):
    own = [10 * rank + i for i in range(rank + 1)]
    return {
        "method": {"x": rows(size), "array": list(range(size)), "step": list(range(size))},
        "gather": rows(size),
        "padded": True,
        "function": own + [0] * (size - rank - 1),
        "sum": [sum(range(size)), size],
        "mean": {"loss": sum(range(size)) / size},
        "broadcast": {"x": [0.0]},
        "objects": [f"rank {i}" for i in range(size)],
        "list": [0, "same"],
    }


def check_evaluation(found, dealt):
    """Each of 11 samples once where a loader or indices say so; all that were dealt, and a warning, elsewhere."""
    everything = list(range(11))
    assert found["tensors"] == found["rows"] == found["exact"] == found["sorted"] == everything
    assert found["names"] == found["columns"] == [f"n{i}" for i in everything]
    assert len(found["guessed"]) == dealt > 11
    (warning,) = found["warnings"]
    assert warning.startswith("gather_for_metrics: no loader prepared with accelerate tells which samples are repeated")


@pytest.mark.parametrize(("size", "order"), [(2, "before"), pytest.param(4, "after", marks=pytest.mark.battery)])
def test_a_script_under_accelerate_launch(size, order, tmp_path):
    config = ("--config_file", "examples/accelerate_cpu.yaml", "--num_processes", size)
    accelerate(*config, SCRIPTS / "accelerated.py", tmp_path, order)
    found = worlds(tmp_path)
    assert [each["exchanged"] for each in found] == [expected(rank, size) for rank in range(size)]
    for each in found:
        assert "rank 1: float32 (2, 3)" in each["refused"]
        assert "accelerated.py:" in each["refused"], "the script's line, not accelerate's"
        assert each["sharded"]["calls"] == ["synchronize_rng_states"]
        assert each["dispatched"]["calls"] == ["broadcast", "broadcast_object_list"]
        assert each["after"] == ["accelerate.utils.operations"] * 2
        assert each["theirs"] == [1.0] * size
        check_evaluation(each["evaluated"], -(-11 // (2 * size)) * 2 * size)
    for loader in ("sharded", "dispatched"):
        assert {row for each in found for row in each[loader]["rows"]} == set(range(11))
