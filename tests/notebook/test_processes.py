"""The ranks' processes: how they are named when they are lost, replaced, started again, and that none stays behind."""

import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import finished, python, start, within
from notebook_kernels import Kernel, kernel, until

from easydist.notebook.machine import _environment

pytestmark = pytest.mark.slow

FOLDER = "cluster._place.folder"


@pytest.fixture(scope="module")
def nb():
    with kernel() as made:
        made.good("import easydist, os, signal\nfrom easydist.notebook import notebook_launcher, start", 60)
        made.good("cluster = start(2)", 60)
        yield made


def test_a_killed_rank_is_named_and_replaced(nb):
    nb.good("%%ranks\nkept = 7\nimport os, signal, torch.distributed as dist")
    text = nb.bad("%%ranks\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\neasydist.gather(1.0)")
    assert re.match(r"rank 1 is lost: process \d+ ended \(killed by SIGKILL\)\n", text)
    ends = "it, and raised PeerLostError", "rank 1 in gather, cell line 3, and was released"  # whoever sees it first
    assert any(f"\nrank 0 waited for {end}\n" in text for end in ends)
    assert "cluster.restart(ranks=[1])" in text
    assert "rank 1 is lost" in nb.bad("%%ranks\nkept")
    text = nb.bad("%%ranks 0\neasydist.gather(1.0)")  # an error of the others would advise recover()
    assert text.startswith("rank 1 is lost: process ")
    assert "cluster.restart(ranks=[1])" in text
    assert "recover" not in text
    assert "ValueError: own" in nb.bad("%%ranks 0\nraise ValueError('own')")
    assert "cluster.restart(ranks=[0, 1])" in nb.bad("cluster.restart(ranks=[0])")
    assert nb.good("%%ranks 0\nkept").lines == ["rank 0: 7"]
    assert "killed by SIGKILL" in nb.good("cluster").results[0]["text/html"]
    nb.good("cluster.restart(ranks=[1])", 60)
    assert nb.good("%%ranks\n'kept' in globals()").lines == ["rank 0: True", "rank 1: False"]
    shown = nb.good("%%ranks\nimport torch.distributed as dist\ndist.all_reduce(t := torch.ones(1))\nt.item()")
    assert shown.lines == ["ranks 0–1: 2.0"]
    assert nb.good("%%ranks\neasydist.gather(torch.tensor([rank])).tolist()").lines == ["ranks 0–1: [0, 1]"]


def test_groups_of_the_user_are_renewed_where_all_their_ranks_know_them(nb):
    nb.good("%%ranks\nimport torch.distributed as dist\npair = dist.new_group([0, 1], backend='easydist_shm')")
    nb.bad("%%ranks\nif rank == 0: raise ValueError\ndist.barrier(pair)")
    nb.good("%%ranks\ndist.barrier(pair); easydist.gather(1.0, group=pair)")
    nb.good("cluster.restart(ranks=[0])", 60)
    assert "can no longer be used" in nb.bad("%%ranks 1\ndist.barrier(pair)")
    nb.good("%%ranks\nimport torch.distributed as dist\ndist.barrier(dist.new_group([0, 1], backend='easydist_shm'))")


def test_an_interrupted_restart_can_be_repeated_and_ends_no_other_rank(nb):
    nb.good("%%ranks\nkept = 7")
    before, asked = set(nb.processes()), []

    def interrupt(shown):
        if "ready" in shown.out and not asked:
            until(lambda: set(nb.processes()) - before)
            asked.append(True)
            nb.manager.interrupt_kernel()

    assert "KeyboardInterrupt" in nb.bad("print('ready')\ncluster.restart(ranks=[1])", 60, interrupt)
    assert nb.good("%%ranks 0\nkept").lines == ["rank 0: 7"]
    assert "rank 1 is lost: cluster.restart(ranks=[1]) replaces it" in nb.bad("%%ranks\nkept")
    nb.good("cluster.status()")
    nb.good("cluster.restart(ranks=[1])", 60)
    assert nb.good("%%ranks\neasydist.gather_object([globals().get('kept')])").lines == ["ranks 0–1: [7, None]"]


def test_all_ranks_are_started_again(nb):
    nb.good("%%ranks\nkept = 7")
    before = set(nb.processes())
    nb.good("cluster.restart()", 60)
    assert "name 'kept' is not defined" in nb.bad("%%ranks\nkept")
    assert not before & set(nb.processes())


def test_what_is_no_number_of_ranks_or_no_list_of_them_is_named_and_ends_none(nb):
    before = nb.processes()
    assert "n=2.0 is not a number of ranks: pass an integer" in nb.bad("start(2.0)")
    assert "n='2' is not a number of ranks: pass an integer" in nb.bad("start('2')")
    for call in ("cluster.restart(1)", "cluster.execute('', ranks=1)", "cluster.run(print, ranks=1)"):
        assert "ranks=1 is not a list of ranks: pass a list of integers" in nb.bad(call)
    assert nb.processes() == before


def test_a_second_cluster_takes_the_place_of_the_first(nb):
    before = nb.processes()
    shown = nb.good("other = start(1)", 60)
    assert shown.lines == ["the 2 ranks that ran before are stopped"]
    assert not psutil.wait_procs(before, within(10))[1]
    assert len(nb.processes()) == 2  # the rank, and the one that ends it with the notebook
    assert "the cluster is stopped; start another one" in nb.bad("cluster.execute('1')")
    nb.good("cluster = start(2)", 60)


LAUNCH = """
def train(scale):
    from accelerate import Accelerator
    import torch
    accelerator = Accelerator(cpu=True)
    gathered = accelerator.gather(torch.ones(1) * accelerator.process_index * scale).tolist()
    print(accelerator.num_processes, accelerator.mixed_precision, gathered)
"""


def have_printed(shown, text):
    """True if both ranks have printed a line, also if one came so much later that the two are not folded."""
    alone = [f"rank {rank}: {text}" for rank in (0, 1)]
    late = [(alone[rank], f"rank {1 - rank}: one more line, equal to one above") for rank in (0, 1)]
    return tuple(shown.lines) in [(f"ranks 0–1: {text}",), tuple(alone), *late]


def test_accelerates_launcher_calls_a_function_on_the_ranks(nb):
    nb.good(LAUNCH)
    before = nb.processes()
    shown = nb.good("notebook_launcher(train, (3,), num_processes=2, mixed_precision='bf16')", 60)
    assert have_printed(shown, "2 bf16 [0.0, 3.0]"), shown
    assert shown.results == []
    assert have_printed(shown := nb.good("notebook_launcher(train, (4,))", 60), "2 no [0.0, 4.0]"), shown
    assert set(nb.processes()) == set(before)
    assert "num_nodes=2" in nb.bad("notebook_launcher(train, (4,), num_nodes=2)")
    nb.good(
        "import threading\ndef made():\n    return threading.Lock()\nnotebook_launcher(made)"
    )  # its result stays there
    assert "raise KeyError('here')" in nb.bad("def fails():\n    raise KeyError('here')\nnotebook_launcher(fails)")


def own_ranks(made):
    """Return the processes of the ranks, without what they have started."""
    return psutil.Process(made.pid).children()


def ended(processes):
    """True if processes have ended in time; those that have not are killed."""
    _, alive = psutil.wait_procs(processes, within(10))
    for process in alive:
        process.kill()
    return not alive


IN_C = "import re\nprint('ready')\nif rank == 1: re.match('(a|a)*b', 'a' * 40)\neasydist.gather(1.0)"


@pytest.mark.parametrize("how", ["stopped", "in C code"])
def test_a_rank_that_cannot_notice_anything_ends_with_the_kernel(how):
    made = Kernel()
    made.good("import easydist\ncluster = easydist.notebook.start(2)", 60)
    processes = made.processes()
    if how == "stopped":
        own_ranks(made)[1].suspend()
    else:
        made.client.execute(f"%%ranks\n{IN_C}")
        until(lambda: made.is_in("gather", 0))
    os.kill(made.pid, signal.SIGKILL)
    assert ended(processes)
    made.close()


def test_nothing_stays_behind_when_the_kernel_and_its_ranks_are_killed():
    made = Kernel()
    made.good("import easydist\ncluster = easydist.notebook.start(2)", 60)
    folder = Path(made.good(f"str({FOLDER})").results[0]["text/plain"].strip("'"))
    processes = made.processes()
    for process in [*own_ranks(made), psutil.Process(made.pid)]:
        process.kill()
    assert ended(processes)
    assert not folder.exists()
    made.close()


def test_what_watches_a_rank_ends_with_it(nb):
    watching = [child for rank in own_ranks(nb) for child in rank.children()]
    assert len(watching) == 2
    nb.good("cluster.restart()", 60)
    assert ended(watching)


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_nothing_stays_behind_when_the_kernel_goes(how):
    made = Kernel()
    made.good("import easydist, os, subprocess\ncluster = easydist.notebook.start(2)", 60)
    made.good("%%ranks\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'])")
    folder = Path(made.good(f"str({FOLDER})").results[0]["text/plain"].strip("'"))
    assert folder.is_dir()
    processes = made.processes()
    assert len(processes) == 6  # the ranks, what they have started, and what watches each
    if how == "killed":
        os.kill(made.pid, signal.SIGKILL)
    else:
        made.client.shutdown()
    assert not psutil.wait_procs(processes, within(20))[1]
    until(lambda: not folder.exists())
    made.close()


SCRIPT = """
import easydist.notebook as notebook

def whoami():
    from easydist import ProcessState
    return ProcessState().process_index

if __name__ == "__main__":
    with notebook.start(2) as cluster:
        cluster.push(x=3)
        cluster.execute("x * world_size")
        print(cluster.run(whoami), cluster.pull("x"), cluster)
    print(cluster)
    notebook.start(1).execute("def f():\\n    return 1 / 0\\nf()")
"""


@pytest.mark.battery
def test_a_plain_program_may_have_ranks_too(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    out, err = python(tmp_path / "script.py", status=1)
    assert out.splitlines() == ["ranks 0–1: 6", "[0, 1] [3, 3] <Cluster of 2 ranks>", "<Cluster, stopped>"]
    assert "CellError: rank 0: ZeroDivisionError: division by zero\n" in err
    if sys.version_info >= (3, 11):  # which shows the notes of an error
        assert "----> 2     return 1 / 0\n" in err


ODD_PATHS = """
import os, pathlib, sys, tempfile
from easydist.notebook import start
sys.path.append(pathlib.Path("here"))
with start(1) as cluster:
    cluster.execute("rank")
    print(cluster.run(len, "ab", ranks=[]), cluster.pull("rank", ranks=[]), cluster.execute("rank", ranks=[]))
"""


def test_paths_of_any_kind_and_no_ranks():
    with tempfile.TemporaryDirectory(prefix="日" * 30) as folder:  # too many bytes for the path of a socket
        process = start(sys.executable, "-c", ODD_PATHS, env=os.environ | {"TMPDIR": folder})
        ((out, err),) = finished(process)
    assert out.splitlines() == ["rank 0: 0", "[] [] None"], err


def test_a_kernel_under_a_launcher_passes_on_none_of_its_variables(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "of the launcher")
    monkeypatch.setenv("HF_HOME", "kept")
    found = _environment(1, SimpleNamespace(size=2, port=7))
    assert not [name for name in found if found[name] == "of the launcher"]
    assert (found["RANK"], found["WORLD_SIZE"], found["HF_HOME"]) == ("1", "2", "kept")


def test_a_rank_that_does_not_start_says_why(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1': raise SystemExit('no GPU')"
    )
    code = "import easydist.notebook as n\ntry:\n    n.start(2)\nexcept RuntimeError as error:\n    print(error)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = start(sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": path})
    ((out, err),) = finished(process)
    assert re.match(r"rank 1 did not start: its process ended \(.*\); its output:\n", out), err
    assert "no GPU" in out


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "ipykernel.py").write_text("raise ImportError('No module named ipykernel', name='ipykernel')")
    code = "import easydist.notebook as n\ntry:\n    n.start(2)\nexcept ImportError as error:\n    print(error)"
    process = start(
        sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    )
    ((out, err),) = finished(process)
    assert out == "easydist.notebook needs ipykernel: run pip install '.[notebook]' in the checkout of easydist\n", err
