"""The ranks of a notebook on a real Ray cluster: cells on two nodes, their failures, and the loss of a node."""

import builtins
import contextlib
import json
import os
import threading

import psutil
import pytest
from actors import HEAD, MARKS, MORTAL, travels
from launching import within
from notebook_kernels import kernel, until

import easydist.notebook
from easydist import CollectiveTimeout, PeerLostError
from easydist.notebook import CellError, CellInterrupted, RankLostError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytestmark = MARKS
travels(__name__)

OWN = {"resources": {"rank": 1}, "timeout": within(60)}
"""One unit of the nodes' resource ``rank`` for each rank."""


@contextlib.contextmanager
def started(size, **options):
    with easydist.notebook.start(size, on="ray", **OWN, **options) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def shared(cluster):
    with started(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared):
    """Two ranks of one node, of which each keeps its own number; lost ones are replaced afterwards."""
    shared.execute("kept = rank")
    yield shared
    if lost := [rank.rank for rank in shared._ranks if rank.has_ended]:
        shared.restart(lost)
    shared.execute("assert easydist.gather(rank).tolist() == [0, 1]")


def when(begun, act):
    """Act once a rank has written the file ``begun``; return the thread that waits for it."""

    def wait():
        until(begun.exists)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_values_functions_and_output_travel(ranks, capfd):
    ranks.push(x={"a": [1, 2]})
    ranks.execute("print('mean', easydist.reduce(torch.tensor(1.0 + rank)).item(), x['a'])\nrank")
    out = capfd.readouterr().out  # equal lines are shown as one unless the machine is slow
    assert ": mean 1.5 [1, 2]\n" in out
    assert out.endswith("rank 0: 0\nrank 1: 1\n")
    assert ranks.pull("kept") == [0, 1]
    assert ranks.run(lambda power: 2**power, 3) == [8, 8]
    assert [(row.node, row.state) for row in ranks.status()] == 2 * [(HEAD, "idle")]
    ranks.execute("import torch.distributed as dist\nbackend = dist.get_backend()")
    assert ranks.pull("backend") == 2 * ["easydist_shm"]


def test_an_exception_shows_once_and_releases_those_that_wait(ranks):
    with pytest.raises(CellError, match=r"^rank 1: ValueError: bad\nrank 0 waited for rank 1 in gather, cell line 3"):
        ranks.execute("if rank == 1:\n    raise ValueError('bad')\neasydist.gather(rank)")
    with pytest.raises(CellError, match=r"^rank 1 waited for rank 0 in gather, cell line 1, and was released$"):
        ranks.execute("if rank: easydist.gather(rank)")
    assert ranks.pull("kept") == [0, 1]


def test_a_cell_can_be_interrupted(ranks, tmp_path):
    thread = when(tmp_path / "begun", ranks.interrupt)
    with pytest.raises(CellInterrupted, match="their variables are kept"):
        ranks.execute(f"open({str(tmp_path / 'begun')!r}, 'w')\nwhile True: pass")
    thread.join()
    assert ranks.pull("kept") == [0, 1]


def test_an_interrupt_before_all_ranks_have_the_cell_counts_for_it(ranks, tmp_path, monkeypatch):
    last, begun = ranks._ranks[-1], tmp_path / "begun"
    send = last.send

    def interrupted(*args):
        until(begun.exists)
        ranks.interrupt()
        send(*args)

    monkeypatch.setattr(last, "send", interrupted)
    with pytest.raises(CellInterrupted, match="their variables are kept"):
        ranks.execute(f"open({str(begun)!r}, 'w')\nwhile True: pass")
    monkeypatch.undo()
    assert ranks.pull("kept") == [0, 1]


def test_a_killed_kernel_is_named_and_replaced(ranks):
    pid = ranks.status()[1].pid
    with pytest.raises(RankLostError, match=rf"^rank 1 is lost: process {pid} ended \(killed, or crashed\)") as caught:
        ranks.execute("import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)\neasydist.gather(rank)")
    assert (caught.value.rank, caught.value.pid) == (1, pid)
    ranks.restart(ranks=[1])
    ranks.execute("kept = globals().get('kept')")
    assert ranks.pull("kept") == [0, None]


def test_a_restart_that_fails_ends_no_other_rank(ranks, monkeypatch):
    def refuses(*_):
        raise CollectiveTimeout("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ranks._place, "meeting", refuses)
        with pytest.raises(CollectiveTimeout, match=r"^no room$"):
            ranks.restart(ranks=[1])
    assert [row.state for row in ranks.status()] == ["idle", "stopped"]
    ranks.restart(ranks=[1])
    ranks.execute("kept = globals().get('kept')")
    assert ranks.pull("kept") == [0, None]


def test_what_cannot_be_is_refused_before_the_running_ranks_are_stopped(ranks):
    with pytest.raises(ValueError, match="on='slurm' is no place for ranks"):
        easydist.notebook.start(2, on="slurm")
    with pytest.raises(ValueError, match="needs the number of ranks"):
        easydist.notebook.start(on="ray")
    with pytest.raises(ValueError, match="strategy='PAC' is none of PACK"):
        easydist.notebook.start(2, on="ray", strategy="PAC")
    with pytest.raises(TypeError, match=r'start: resources need on="ray"'):
        easydist.notebook.start(2, resources={"GPU": 1})
    assert ranks.pull("kept") == [0, 1]


def test_what_a_rank_has_started_ends_with_it(ranks):
    ranks.execute("import subprocess\nchild = subprocess.Popen(['sleep', '600']).pid")
    row, child = ranks.status()[0], ranks.pull("child")[0]
    psutil.Process(row.pid).kill()
    until(lambda: not psutil.pid_exists(row.pid) and not psutil.pid_exists(child))
    with pytest.raises(RankLostError, match=r"^rank 0 is lost: cluster\.restart\(ranks=\[0\]\) replaces it"):
        until(lambda: ranks.execute("1"))
    assert ranks.status()[0].state == "killed, or crashed"


# What follows starts ranks of its own, in place of those above.


def keeps(name, value):
    """Let a module of the rank, which cells and functions see, keep a value."""
    setattr(builtins, name, value)
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture what programs write


def gathered(name):
    own = getattr(builtins, name, None), os.getpid(), easydist.ProcessState().process_index
    return easydist.gather_object([own])


@pytest.fixture(scope="module")
def existing(cluster):
    with easydist.ray.Ranks(2, **OWN) as made:
        yield made


def test_cells_and_functions_share_the_processes_of_existing_ranks(existing, tmp_path, capfd):
    existing.run(keeps, "kept", "a function's")
    pids = existing.run(os.getpid)
    with easydist.notebook.start(on=existing) as notebook:
        assert [row.pid for row in notebook.status()] == pids
        notebook.execute("import builtins, os\nos.system('echo a child')\nprint(builtins.kept, easydist.gather(rank))")
        out = capfd.readouterr().out
        assert ": a child\n" in out
        assert ": a function's tensor([0, 1])\n" in out
        with pytest.raises(CellError, match=r"^rank 1: ValueError: bad\nrank 0 waited for rank 1 in gather"):
            notebook.execute("if rank: raise ValueError('bad')\neasydist.gather(rank)")
        thread = when(tmp_path / "begun", notebook.interrupt)
        with pytest.raises(CellInterrupted, match="their variables are kept"):
            notebook.execute(f"open({str(tmp_path / 'begun')!r}, 'w')\nwhile True: pass")
        thread.join()
        notebook.execute("builtins.kept = rank")
        for call in (lambda: existing.run(os.getpid), existing.restart, existing.lend):
            with pytest.raises(RuntimeError, match=r"^a notebook runs cells on these ranks: cluster.run\(fn\) calls"):
                call()
    assert existing.run(gathered, "kept") == 2 * [[(rank, pids[rank], rank) for rank in range(2)]]
    with easydist.notebook.start(2, on=existing) as notebook:
        notebook.execute("import builtins\nprint(easydist.gather(builtins.kept), 'os' in globals())")
        assert ": tensor([0, 1]) False\n" in capfd.readouterr().out


def test_a_lost_one_of_existing_ranks_is_replaced_in_the_notebook_or_after_it(existing):
    existing.run(keeps, "kept", "a function's")
    dies = "import os\nif rank: os.kill(os.getpid(), 9)\neasydist.gather(rank)"
    with easydist.notebook.start(on=existing) as notebook:
        with pytest.raises(RankLostError, match=r"^rank 1 is lost: process \d+ ended \(killed, or crashed\)"):
            notebook.execute(dies)
        notebook.restart(ranks=[1])
        notebook.execute("import builtins\nkept = easydist.gather_object([getattr(builtins, 'kept', None)])")
        assert notebook.pull("kept") == 2 * [["a function's", None]]
        with pytest.raises(RankLostError):
            notebook.execute(dies)
    with pytest.raises(PeerLostError, match=r"^run: rank 1 is lost"):
        existing.run(os.getpid)
    with pytest.raises(PeerLostError, match=r"^run: rank 1 is lost"):
        easydist.notebook.start(on=existing)
    existing.restart([1])
    assert [kept for kept, *_ in existing.run(gathered, "kept")[0]] == ["a function's", None]


def test_existing_ranks_stay_as_they_are(existing):
    with pytest.raises(ValueError, match="on= has 2 ranks, got n=3"):
        easydist.notebook.start(3, on=existing)
    with pytest.raises(TypeError, match="resources cannot be changed: the ranks of on= exist"):
        easydist.notebook.start(on=existing, resources={"CPU": 1})


def test_ranks_have_the_variables_of_a_launcher_and_a_key_that_no_process_shows(cluster, monkeypatch):
    key = "a-key-that-no-process-shows" * 2
    monkeypatch.setenv("EASYDIST_JOB_KEY", key)
    names = ["EASYDIST_JOB_KEY", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"]
    with started(2) as ranks:
        ranks.restart(ranks=[1])
        ranks.execute(f"import os\nown = [os.environ.get(name) for name in {names}]")
        assert ranks.pull("own") == [[key, "0", "0", "2", "2", "0"], [key, "1", "1", "2", "2", "0"]]
        commands = [psutil.Process(rank.pid).cmdline() for rank in ranks.status()]
        assert not any(key in word for words in commands for word in words)


def test_the_ranks_of_two_nodes_outlive_one_of_them(cluster, tmp_path, capfd):
    own = {"EASYDIST_HOST_ID": "mortal"}
    node = cluster.add_node(node_ip_address=MORTAL, resources={"rank": 1}, env_vars=own, **cluster.node)
    with started(2, strategy="SPREAD") as ranks:
        nodes = [row.node for row in ranks.status()]
        assert sorted(nodes) == [HEAD, MORTAL]
        ranks.execute("kept = rank\nprint(easydist.gather(rank).tolist(), easydist.ProcessState().num_nodes)")
        assert ": [0, 1] 2\n" in capfd.readouterr().out
        with pytest.raises(CellError, match=r"^rank 0: ValueError: bad\nrank 1 waited for rank 0 in gather"):
            ranks.execute("if rank == 0: raise ValueError('bad')\neasydist.gather(rank)")
        mortal, begun = nodes.index(MORTAL), tmp_path / "begun"
        thread = when(begun, lambda: cluster.remove_node(node, allow_graceful=False))
        cell = f"open({str(begun)!r}, 'w')\nimport time\nif rank == {mortal}: time.sleep(1000)\neasydist.gather(rank)"
        text = rf"^rank {mortal} is lost: process \d+ ended \(its node (has died|does not answer)\)"  # as Ray knows it
        with pytest.raises(RankLostError, match=text):
            ranks.execute(cell)
        thread.join()
        assert ranks.status()[mortal].node == MORTAL
        ranks.restart(ranks=[mortal])  # on the other node
        assert [row.node for row in ranks.status()] == [HEAD, HEAD]
        ranks.execute("kept = easydist.gather_object(globals().get('kept'))")
        assert ranks.pull("kept") == 2 * [[None if rank == mortal else rank for rank in range(2)]]


def test_too_few_resources_are_told(cluster):
    with pytest.raises(CollectiveTimeout, match=r"^Ranks: 2 ranks with nothing 1 each"):
        easydist.notebook.start(2, on="ray", resources={"nothing": 1}, timeout=1)


@pytest.mark.battery
def test_the_ranks_of_a_notebook_end_with_it(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with kernel() as notebook:
        notebook.good("import easydist.notebook")
        notebook.good("cluster = easydist.notebook.start(2, on='ray', resources={'rank': 1})", seconds=60)
        assert ": [0, 1]\n" in notebook.good("%%ranks\nprint(easydist.gather(rank).tolist())").out
        pids = json.loads(notebook.good("[row.pid for row in cluster.status()]").results[0]["text/plain"])
        assert "node" in notebook.good("cluster.status()").results[0]["text/html"]
        assert "Interrupted" in notebook.interrupted_in("", "%%ranks\nprint('ready')\nwhile True: pass")
        psutil.Process(notebook.pid).kill()
        until(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_cluster_that_the_program_has_left_takes_the_ranks_with_it(cluster):
    with started(1) as ranks, easydist.ray.Ranks(1, **OWN) as others:
        pid = ranks.status()[0].pid
        ray.shutdown()
        try:
            with pytest.raises(RuntimeError, match="these ranks are closed"):
                others.run(os.getpid)
            until(lambda: ranks.status()[0].state == "Ray has no connection to it any more")
            with pytest.raises(RankLostError, match="rank 0 is lost"):
                ranks.execute("1")
            ranks.stop()
            assert not ray.is_initialized()  # no question has started a cluster
            until(lambda: not psutil.pid_exists(pid))
        finally:
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False, _node_ip_address=HEAD)
