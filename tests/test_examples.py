"""Tests that the examples print the output that the documentation shows."""

import contextlib
import importlib
import io
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec

import pytest
from actors import SECOND
from launching import ROOT, fork, forked, python

from easydist.testing import default_pool

OURS = "easydist.testing.worker"
"""Loads what most processes of the examples use of easydist."""


def on_ranks(count, example, *arguments):
    """Run an example with torchrun, and return its output."""
    options = ("--standalone", "--nproc-per-node", count)
    command = ("-m", "torch.distributed.run", *options, ROOT / "examples" / example, *arguments)
    return forked(*command, PYTHON_EXEC=fork(OURS))[0]


def test_the_page_of_examples_names_each_of_them():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"`(\w+\.\w+|hostfile)`", page)) == {
        path.name for path in (ROOT / "examples").iterdir() if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "page"),
    [
        ("gather_nested.py", "quickstart.md"),
        ("objects.py", "objects.md"),
        ("first_on_main.py", "state.md"),
        ("own_communicator.py", "backends.md"),
    ],
)
def test_the_page_of_a_short_example_shows_its_output(example, page):
    command = f"$ torchrun --standalone --nproc-per-node 2 examples/{example}\n"
    assert command + on_ranks(2, example) in (ROOT / "docs" / page).read_text()


@pytest.mark.slow
def test_metrics_exactly_right():
    out = on_ranks(2, "metrics_exactly_right.py")
    assert out in (ROOT / "docs" / "tutorial_metrics.md").read_text()
    lines = on_ranks(3, "metrics_exactly_right.py").splitlines()
    assert [line.endswith("wrong") for line in lines[2:]] == 4 * [True] + 3 * [False]
    assert {line[30:] for line in lines[6:]} == {out.splitlines()[1][30:]}


def evaluate():
    """Run examples/evaluate.py on this rank of a pool, which starts faster than a launcher, and return its output."""
    sys.path.insert(0, str(ROOT / "examples"))  # the pool sets the path of each run
    example = importlib.import_module("evaluate")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        example.main()
    return out.getvalue()


def on_ray(example, address, *arguments, **environment):
    """Run an example on a cluster of Ray, and return its output."""
    out, _ = python(ROOT / "examples" / example, *arguments, seconds=120, RAY_ADDRESS=address, **environment)
    return out


@pytest.mark.slow
def test_ray_engine(cluster):
    assert on_ray("ray_engine.py", cluster.address) in (ROOT / "docs" / "weights.md").read_text()


@pytest.mark.battery
@pytest.mark.slow
def test_ray_weight_sync(cluster):
    lines = on_ray("ray_weight_sync.py", cluster.address).splitlines()
    rewards = [float(line.rsplit(maxsplit=1)[1]) for line in lines if "reward" in line]
    assert rewards[0] < -10 < -0.5 < rewards[-1]
    assert [line.partition(";")[0] for line in lines if "reward" not in line] == ["worker 1 was lost"]


@pytest.mark.slow
def test_ray_evaluation(cluster):
    node = cluster.add_node(node_ip_address=SECOND, num_cpus=2, env_vars={"EASYDIST_HOST_ID": "second"}, **cluster.node)
    out = on_ray("ray_evaluation.py", cluster.address, 2)
    cluster.remove_node(node)
    left = [int(each) for each in re.findall(r"(\d+) of 400 texts are left for 4 ranks", out)]
    assert left[0] == 400 > left[1] > 0
    lines = [line for line in out.splitlines() if line.startswith(("rank 2", "perplexity", "equal"))]
    assert len(lines) == 3
    assert "\n".join(lines) in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("pyarrow"), reason="Ray Data needs pyarrow: pip install 'ray[data,train]'")
def test_ray_data(cluster):
    out = on_ray("ray_data.py", cluster.address)
    page = (ROOT / "docs" / "clusters.md").read_text()
    found = re.findall(r"^(.+): \[(.+)\] (samples, loss .+)", out, re.MULTILINE)
    assert [where for where, _, _ in found] == ["ranks", "Ray Train's workers"]
    for _, counts, loss in found:
        assert sum(map(int, counts.split(", "))) == 1001
        assert loss in page
    assert "\nequal to one process, to the last digit\n" in out


@pytest.mark.battery
@pytest.mark.slow
def test_ray_ranks():
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # a Ray of its own
        out = on_ray("ray_ranks.py", "local", RAY_TMPDIR=folder, RAY_worker_niceness="0")
    lines = [line for line in out.splitlines() if "raylet" not in line]
    assert "\n".join(lines) in (ROOT / "docs" / "clusters.md").read_text()
    assert len(lines) == 3


def with_survivors(example, interpreter):
    """Run an example whose rank 1 is killed, and return its output, which the documentation shows."""
    path = ROOT / "examples" / example
    out, err = forked("-m", "easydist", "run", "--survivors", "-n", "3", path, PYTHON_EXEC=interpreter)
    assert "rank 1: process " in err
    assert "was killed by SIGKILL; the others continue" in err
    assert out in (ROOT / "docs" / "recovering.md").read_text()
    return out


@pytest.mark.slow
def test_survivors_finish_the_evaluation():
    assert with_survivors("survivors.py", fork(OURS)) == "[rank 0] 2 ranks go on\n[rank 0] 60 of 60 are right\n"


@pytest.mark.slow
def test_survivors_finish_the_training_as_one_process_would():
    optimizing = fork(OURS, "torch._dynamo")  # which the first optimizer of a process loads
    alone, _ = python(ROOT / "examples" / "train_survivors.py", interpreter=optimizing)
    assert with_survivors("train_survivors.py", optimizing).splitlines()[1:] == [f"[rank 0] {alone.strip()}"]


@pytest.mark.slow
def test_a_contrastive_loss_has_the_gradients_of_one_process():
    page = (ROOT / "docs" / "gradients.md").read_text()
    for count in (1, 2, 3):
        out = on_ranks(count, "contrastive_loss.py")
        assert out in page
        assert out.endswith("equal to one process: True\n")


@pytest.mark.battery
@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_on_another_number_of_ranks(tmp_path):
    page = (ROOT / "docs" / "tutorial_training.md").read_text()
    folder = tmp_path / "run"  # the script makes it
    first, _ = forked(ROOT / "examples" / "train.py", folder, 2)
    assert first in page
    resumed = on_ranks(2, "train.py", folder, 3)
    assert resumed in page
    whole = tmp_path / "whole"
    assert forked(ROOT / "examples" / "train.py", whole, 3)[0] == first + resumed


@pytest.mark.battery
@pytest.mark.slow
def test_evaluate_gives_the_same_on_any_number_of_ranks():
    printed = [default_pool().run(evaluate, count)[0].splitlines() for count in (1, 2, 3, 4)]
    assert [lines[0] for lines in printed] == [
        "images on each rank: [599]",
        "images on each rank: [300, 299]",
        "images on each rank: [200, 200, 199]",
        "images on each rank: [150, 150, 150, 149]",
    ]
    assert printed[0][1:] == printed[1][1:] == printed[2][1:] == printed[3][1:]
    assert printed[0][-1] == "equal to the single-process run, to the last digit"
    assert on_ranks(2, "evaluate.py").splitlines() == printed[1]
    captured = (ROOT / "docs" / "captures" / "first_hour" / "run.txt").read_text()
    for line in printed[1]:
        assert f"[rank 0] {line.partition(' margin ')[0]}" in captured  # its last digits are those of one machine


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_ranks_compute_what_one_process_does():
    assert on_ranks(4, "tensor_parallel.py") == "tensor 2 × pipeline 2: equal to one process True\n"


def said(cell):
    """Return the texts of a cell's outputs."""
    return "".join(output.get("text", "") for output in cell.outputs)


def said_by_each(cell):
    """Return the lines of each rank; on a loaded machine, equal lines may come too far apart to be shown as one."""
    lines, every = defaultdict(list), {}
    for line in said(cell).splitlines():
        who, _, text = line.partition(": ")
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", who):
            for rank in range(int(first), int(last or first) + 1):
                lines[rank].append(text)
        if not LATE.fullmatch(text):
            every[text] = None
    return [_completed(lines[rank], [*every]) for rank in sorted(lines)]


LATE = re.compile(r"(\w+) more lines?, equal to .*")
"""Tells how many lines of a rank came too late to be shown with the others."""


def _completed(own, every):
    """Return a rank's lines with those that came too late."""
    late = LATE.fullmatch(own[-1])
    if not late:
        return own
    assert len(own) - 1 + (1 if late[1] == "one" else int(late[1])) == len(every)
    return every


@pytest.mark.battery
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("nbclient"), reason="needs nbclient")
def test_the_notebook_trains_evaluates_exactly_and_plots(tmp_path):
    import nbformat

    source = ROOT / "examples" / "notebook.ipynb"
    assert not any(cell.get("outputs") for cell in nbformat.read(source, 4).cells), "strip the outputs: they change"
    home = {"IPYTHONDIR": tmp_path, "JUPYTER_RUNTIME_DIR": tmp_path, "JUPYTER_CONFIG_DIR": tmp_path}
    shutil.copy(source, tmp_path)
    python("-m", "jupyter", "execute", "--inplace", tmp_path / source.name, **home)
    done = [cell for cell in nbformat.read(tmp_path / source.name, 4).cells if cell.cell_type == "code"]
    train, evaluate, fails, works, plot, status = done[4:10]
    trained, evaluated = said_by_each(train), said_by_each(evaluate)
    assert trained == 4 * [trained[0]]
    assert [line.rpartition(" ")[0] for line in trained[0]] == [f"epoch {epoch}: loss" for epoch in range(1, 7)]
    losses = [float(line.rpartition(" ")[2]) for line in trained[0]]
    assert losses == sorted(losses, reverse=True)
    assert evaluated == [[f"{count} images", evaluated[0][1]] for count in (150, 150, 150, 149)]
    right = float(evaluated[0][1]) * 599
    assert right == pytest.approx(round(right))
    assert right > 0.9 * 599
    (error,) = [output for output in fails.outputs if output.output_type == "error"]
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    assert shown.startswith("rank 2 raised\n")
    assert f"Cell In[{fails.execution_count}], line 3\n" in shown
    waited = "ranks 0–1, 3 waited for rank 2 in gather, cell line 4, and were released"
    assert shown.endswith(f"\nValueError: a bad batch\n{waited}")
    assert said(works) == "ranks 0–3: tensor([0, 1, 2, 3])\n"
    assert any("image/png" in output.get("data", {}) for output in plot.outputs)
    assert any("text/html" in output.get("data", {}) for output in status.outputs)
