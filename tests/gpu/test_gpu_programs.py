"""Programs on a machine with a GPU: a launcher, training, too many ranks, a notebook."""

import pytest
import torch
from gpus import NEEDED
from launching import ROOT, python
from notebook_kernels import kernel

pytestmark = NEEDED

SHARED = """
import easydist, torch
state = easydist.ProcessState()
mine = torch.ones(1, device=state.device)
for _ in range(2):
    try:
        easydist.gather(mine)
    except RuntimeError as error:
        print(type(error).__name__, error)
    print(easydist.gather(torch.ones(1)).tolist())
"""


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each rank would have a GPU of its own")
def test_two_ranks_on_one_gpu_are_told_what_to_do(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    out, err = python("-m", "easydist", "run", "-n", "2", script)
    assert out.count("NCCL needs a GPU for each rank") == 4, out + err
    assert out.count("[1.0, 1.0]") == 4
    told = 'state = easydist.ProcessState(backend="gloo")'
    script.write_text(SHARED.replace("state = easydist.ProcessState()", told).replace("state.device", '"cuda"'))
    out, _ = python("-m", "easydist", "run", "-n", "2", script)
    assert "NCCL" not in out


def test_training_on_the_gpu(tmp_path):
    out, _ = python("-m", "easydist", "run", "-n", "1", ROOT / "examples" / "train.py", tmp_path, 2, seconds=120)
    assert "accuracy" in out, out
    alone, _ = python(ROOT / "examples" / "train.py", tmp_path, 3, seconds=120)
    assert "accuracy" in alone


def test_ranks_of_a_notebook_use_the_gpu():
    pytest.importorskip("ipykernel")
    with kernel() as nb:
        nb.good("import easydist\ncluster = easydist.notebook.start(2)", 120)
        nb.good(
            "%%ranks\nimport torch, easydist\nx = easydist.gather(torch.full((2,), float(rank), device='cuda'))", 120
        )
        assert nb.good("%%ranks\n(x.device.type, x.tolist())").lines == ["ranks 0–1: ('cuda', [0.0, 0.0, 1.0, 1.0])"]
        nb.good("%%ranks\ntorch.cuda.synchronize()")
