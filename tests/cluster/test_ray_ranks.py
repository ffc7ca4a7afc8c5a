"""easydist.ray.Ranks on real Ray actors: the world of the ranks, their failures and losses, and what stays behind."""

import builtins
import contextlib
import gc
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from actors import HEAD, MARKS, MORTAL, logs, travels
from launching import forked, within

import easydist
from easydist import CollectiveTimeout, OverlappingCallError, PeerLostError, RemoteError
from easydist.cluster import placement
from easydist.cluster.actors import CLOSED
from easydist.shm import progress

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = MARKS
travels(__name__)


@contextlib.contextmanager
def started(size, **options):
    """Start ranks, each with one unit of the nodes' resource ``rank``."""
    with easydist.ray.Ranks(size, **{"resources": {"rank": 1}, "timeout": within(60), **options}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def shared(cluster):
    with started(3) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared):
    """Three ranks of one node, of which each keeps its own number; lost ones are replaced afterwards."""
    shared.run(keeps)
    yield shared
    if shared._lost:
        shared.restart(list(shared._lost))


def rank():
    return easydist.ProcessState().process_index


def keeps():
    builtins.kept = rank()


def kept():
    return getattr(builtins, "kept", None), os.getpid()


def threads():
    """Return the threads that might begin an operation beside this one."""
    others = [thread for thread in threading.enumerate() if thread.ident != threading.get_ident()]
    return [thread.name for thread in others if not progress._is_service(thread)]


def gathered():
    return easydist.gather(torch.tensor([rank()])).tolist()


# --- worlds


def place():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    state = easydist.ProcessState()
    own = easydist.gather(torch.tensor([state.process_index])).tolist()
    groups = state.num_processes, state.local_process_index, state.local_world_size, state.node_rank, state.num_nodes
    return own, groups, os.environ["MASTER_ADDR"], ray.util.get_node_ip_address()


def never_comes(absent, begun):
    """One rank tells that it has begun, and does not come to the call of the others."""
    if rank() == absent:
        begun.write_text("")
        threading.Event().wait()
    gathered()


@contextlib.contextmanager
def when(begun, act):
    """Act once a rank has opened the pipe ``begun``, during the block."""
    os.mkfifo(begun)
    thread = threading.Thread(target=lambda: (begun.read_text(), act()))
    thread.start()
    yield
    thread.join(within(10))


def test_a_world_of_two_nodes_outlives_one_of_them(cluster, tmp_path):
    node = cluster.add_node(
        node_ip_address=MORTAL, resources={"rank": 1}, env_vars={"EASYDIST_HOST_ID": "mortal"}, **cluster.node
    )
    with started(3, strategy="SPREAD") as ranks:
        found = ranks.run(place)
        by_node = {home: [groups for _, groups, _, other in found if other == home] for home in (HEAD, MORTAL)}
        assert [own for own, *_ in found] == [[0, 1, 2]] * 3
        assert {master for _, _, master, _ in found} == {found[0][3]}
        assert (len(by_node[HEAD]), len(by_node[MORTAL])) == (2, 1)
        for there in by_node.values():
            assert [groups[:3] for groups in there] == [(3, local, len(there)) for local in range(len(there))]
        assert [groups[3:] for _, groups, *_ in found] in ([(0, 2), (0, 2), (1, 2)], [(0, 2), (1, 2), (1, 2)])
        ranks.run(keeps)
        mortal = [address for *_, address in found].index(MORTAL)
        text = rf"^run: rank {mortal} is lost: process \d+ on .* \({MORTAL}\): its node "
        dies = when(tmp_path / "begun", lambda: cluster.remove_node(node, allow_graceful=False))
        with dies, pytest.raises(PeerLostError, match=text) as caught:
            ranks.run(never_comes, mortal, tmp_path / "begun")
        assert caught.value.rank == mortal
        assert f"ranks.restart([{mortal}]) replaces" in str(caught.value)
        ranks.restart([mortal])  # on the other node
        assert [value for value, _ in ranks.run(kept)] == [None if r == mortal else r for r in range(3)]
        assert [(own, address) for own, *_, address in ranks.run(place)] == [([0, 1, 2], HEAD)] * 3


# --- failures and losses


def test_rays_own_threads_begin_no_operations(ranks):
    """Otherwise ranks that wait for one another in a circle would not be told so."""
    assert ranks.run(threads) == [[]] * 3


def exits():
    raise SystemExit(3)


def in_new_world(ranks):
    """Let the next call of the ranks be the first one in a world."""
    with pytest.raises(RemoteError, match=r"^run: ranks 0–2 of 3 raised SystemExit: 3\n"):
        ranks.run(exits)


def fails(first_call):
    if not first_call:
        gathered()
    if rank() == 1:
        raise LookupError("no such sample")
    gathered()


def fails_beside_torch():
    assert easydist.ProcessState().process_group is dist.group.WORLD
    if rank() == 1:
        raise LookupError("no such sample")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", ["first call", "later call", "torch"])
def test_a_failure_is_raised_once_and_the_others_hear(ranks, how):
    in_new_world(ranks)
    before = ranks.run(kept)
    with pytest.raises(RemoteError, match=r"^run: rank 1 of 3 raised LookupError: no such sample\n") as caught:
        ranks.run(fails_beside_torch) if how == "torch" else ranks.run(fails, how == "first call")
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LookupError)
    text = str(caught.value)
    assert f"on rank 1, process {before[1][1]} on " in text
    assert 'raise LookupError("no such sample")\nLookupError: no such sample\n' in text
    if how != "torch":
        assert "  ranks 0, 2 raised RemoteError: run: rank 1 failed while others waited for it\n" in text
    assert ranks.run(kept) == before
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


class Speechless(Exception):
    def __str__(self):
        raise LookupError


def fails_at_once():
    raise ValueError


def sockets():
    gc.collect()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)


def test_a_new_world_keeps_no_connection_of_the_old_one(ranks):
    def once():
        with pytest.raises(RemoteError):
            ranks.run(fails_at_once)
        return ranks.run(gathered)

    assert once() == once() == [[0, 1, 2]] * 3
    before = ranks.run(sockets)
    for _ in range(6):
        once()
    assert all(now <= then + 3 for now, then in zip(ranks.run(sockets), before, strict=True))


def fails_without_words():
    if rank() == 1:
        raise Speechless
    gathered()


def test_an_error_whose_text_fails_is_heard(ranks):
    with pytest.raises(
        RemoteError, match=r"^run: rank 1 of 3 raised Speechless\n  ranks 0, 2 raised RemoteError: run: "
    ):
        ranks.run(fails_without_words)
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


def returns(first_call):
    if not first_call:
        gathered()
    return "early" if rank() == 1 else gathered()


@pytest.mark.parametrize("first_call", [True, False])
def test_ranks_do_not_wait_for_one_that_has_returned(ranks, first_call):
    in_new_world(ranks)
    text = (
        r"^run: ranks 0, 2 of 3 raised RemoteError: run: rank 1 returned from the function while others waited for it\n"
    )
    with pytest.raises(RemoteError, match=text):
        ranks.run(returns, first_call)
    assert ranks.run(gathered) == [[0, 1, 2]] * 3
    ray.get([actor.part_if_awaited.remote() for _, actor in ranks._actors.items()])  # nobody waits
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


def ends(victim, first_call):
    if not first_call:
        gathered()
    if rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered()


@pytest.mark.parametrize(("victim", "first_call"), [(1, True), (1, False), (0, True)])
def test_a_killed_rank_is_named_and_replaced(ranks, victim, first_call):
    others = [one for one in range(3) if one != victim]
    in_new_world(ranks)
    before = ranks.run(kept)
    text = rf"^run: rank {victim} is lost: process \d+ on .* was killed, or crashed\n  ranks? .* raised PeerLostError: "
    with pytest.raises(PeerLostError, match=text) as caught:
        ranks.run(ends, victim, first_call)
    assert (caught.value.rank, caught.value.pid) == (victim, before[victim][1])
    with pytest.raises(PeerLostError, match=rf"^run: rank {victim} is lost"):
        ranks.run(kept)
    with pytest.raises(
        RuntimeError, match=rf"^restart: rank {victim} could not join .*: ranks.restart\(\[{victim}, 2\]\)$"
    ):
        ranks.restart([2])
    ranks.restart([victim])
    after = ranks.run(kept)
    assert [after[one] for one in others] == [before[one] for one in others]
    assert after[victim][0] is None
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


KEY = "a-key-of-the-job-which-nobody-else-knows"


def knows_the_key():
    return easydist.settings.read(easydist.settings.JOB_KEY) == KEY, easydist.gather_object([rank()])


@pytest.mark.battery
def test_ranks_get_the_drivers_job_key_and_ray_does_not_log_it(shared, cluster, monkeypatch):
    monkeypatch.setenv(easydist.settings.JOB_KEY, KEY)
    with started(2, resources={"rank": 0.5}) as ranks:
        assert ranks.run(knows_the_key) == [(True, [0, 1])] * 2
        ranks.restart([1])
        assert ranks.run(knows_the_key) == [(True, [0, 1])] * 2
    assert KEY not in logs(cluster)


class Unloadable:
    def __reduce__(self):
        return divmod, (1, 0)


def test_what_cannot_be_run_or_returned_is_an_error(ranks):
    with pytest.raises(TypeError, match=r"^run: kept or its arguments cannot be sent to the ranks: "):
        ranks.run(kept, threading.Lock())
    with pytest.raises(TypeError, match="sent to the ranks: Ranks belong to the program that made them"):
        ranks.run(lambda: ranks.run(kept))
    with pytest.raises(
        TypeError, match=r"^run: fn=\[3\] cannot be called: pass a function, and its arguments after it$"
    ):
        ranks.run([3])
    unsent = r"^run: ranks 0–2 of 3 raised TypeError: the result, a lock, cannot be sent to the driver: cannot pickle"
    with pytest.raises(RemoteError, match=unsent):
        ranks.run(threading.Lock)
    with pytest.raises(
        TypeError, match=r"^run: the result of rank 0 cannot be loaded in the driver: ZeroDivisionError: "
    ):
        ranks.run(Unloadable)
    with pytest.raises(ValueError, match=r"^restart: there is no rank 3: there are 3 ranks$"):
        ranks.restart([0, 3])
    with pytest.raises(TypeError, match=r"^ranks=1 is not a list of ranks: pass a list of integers$"):
        ranks.restart(1)
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


def test_ctrl_c_interrupts_all_ranks(ranks, tmp_path):
    before = ranks.run(kept)
    with when(tmp_path / "begun", lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        ranks.run(never_comes, 2, tmp_path / "begun")
    assert ranks.run(kept) == before
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


def test_ctrl_c_while_the_calls_are_sent_interrupts_all_ranks(ranks, tmp_path, monkeypatch):
    before, actors = ranks.run(kept), dict(ranks._actors.items())

    def pressed():
        yield from actors.items()
        (tmp_path / "begun").read_text()  # the last call has begun before the driver knows of it
        signal.raise_signal(signal.SIGINT)

    os.mkfifo(tmp_path / "begun")
    monkeypatch.setattr(ranks._actors, "items", pressed)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(never_comes, 2, tmp_path / "begun")
    monkeypatch.undo()
    assert ranks.run(kept) == before


@pytest.mark.battery
def test_ranks_can_be_closed_while_they_run_a_function(cluster, tmp_path):
    ranks = easydist.ray.Ranks(1, resources={"rank": 1}, timeout=within(60))
    with when(tmp_path / "begun", ranks.close), pytest.raises(RuntimeError, match=r"^these ranks are closed; "):
        ranks.run(never_comes, 0, tmp_path / "begun")


def ignores(begun):
    if rank() == 2:
        begun.write_text("")
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


def waits_for(fifo):
    return fifo.read_text() if rank() == 0 else ""


def test_a_second_thread_is_refused_and_disturbs_nothing(ranks, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    results = []
    thread = threading.Thread(target=lambda: results.append(ranks.run(waits_for, fifo)))
    thread.start()
    with open(fifo, "w"):  # once rank 0 waits
        for call in (lambda: ranks.run(gathered), lambda: ranks.restart([0])):
            with pytest.raises(OverlappingCallError, match=r"^(run|restart): another thread runs a function on these"):
                call()
    thread.join(within(20))
    assert results == [[""] * 3]


def test_a_rank_that_ignores_ctrl_c_is_named_and_replaced(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("easydist.cluster.ranks._STOPS_WITHIN", 0.1)
    with when(tmp_path / "begun", lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        ranks.run(ignores, tmp_path / "begun")
    with pytest.raises(RuntimeError, match=r"^run: code on rank 2 ignores Ctrl-C: wait, or ranks.restart\(\[2\]\)$"):
        ranks.run(gathered)
    ranks.restart([2])
    assert ranks.run(gathered) == [[0, 1, 2]] * 3


# --- the start


def alive():
    """Return the placement groups that have not been removed, and the actors, of this driver."""
    groups = ray.util.placement_group_table().values()
    return [group["placement_group_id"] for group in groups if group["state"] != "REMOVED"]


def test_too_few_resources_are_told_and_nothing_stays(shared):
    before = alive()
    with pytest.raises(
        CollectiveTimeout, match=r"^Ranks: 9 ranks with rank 1 each \(PACK\) were not started within"
    ) as caught:
        easydist.ray.Ranks(9, resources={"rank": 1}, timeout=0.2)
    assert "\n  rank: 1 of 4 free\n" in str(caught.value)
    assert alive() == before
    assert ray.available_resources()["rank"] == 1


def test_a_long_wait_for_resources_is_logged(shared, monkeypatch, caplog):
    monkeypatch.setattr(placement, "_TELLS_AFTER", 0.1)
    with pytest.raises(CollectiveTimeout, match=r"were not started within 0.2 s"):
        easydist.ray.Ranks(9, resources={"rank": 1}, timeout=0.2)
    (said,) = caplog.messages
    assert said.startswith("Ranks: 9 ranks with rank 1 each (PACK) were not started within 0.1 s\n")
    assert said.endswith("\n  rank: 1 of 4 free\nStill waiting.")


def places():
    """Return the folders in which Python finds an easydist; the driver's own comes first on its own machine."""
    return [path for path in sys.path if os.path.exists(os.path.join(path, "easydist", "cluster", "worker.py"))]


def test_easydist_is_sent_to_the_nodes(shared):
    with started(1, ship=True) as ranks:
        assert any("py_modules" in path for path in ranks.run(places)[0])
    with pytest.raises(RuntimeError, match=r"^these ranks are closed"):
        ranks.run(places)


def packages():
    """Return the names of what drivers have sent, and Ray still has."""
    from ray.experimental.internal_kv import _internal_kv_list

    return {*_internal_kv_list("gcs://_ray_pkg")}


def test_easydist_is_sent_again_when_all_ranks_are_replaced(shared):
    """Ray has dropped the package if no rank was left that used it."""
    from ray.experimental.internal_kv import _internal_kv_del

    with started(1, ship=True) as ranks:
        sent = packages()
        for name in sent:
            _internal_kv_del(name)
        assert not packages()
        ranks.restart()
        assert packages() == sent


def test_another_version_of_torch_is_an_error(shared, tmp_path):
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    path = os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(easydist.__file__))])
    before = alive()
    with pytest.raises(RuntimeError, match=rf"^Ranks: nodes have other versions .*\n  {HEAD}: Python .*, torch 1.0\n"):
        easydist.ray.Ranks(1, resources={"rank": 1}, runtime_env={"env_vars": {"PYTHONPATH": path}})
    assert alive() == before


@pytest.mark.parametrize(
    ("environment", "error", "text"),
    [({"pip": 3}, TypeError, "pip"), ({"working_dir": "/nowhere"}, ValueError, "/nowhere")],
)
def test_a_wrong_environment_is_refused_before_the_wait_for_resources(cluster, environment, error, text):
    before = alive()
    with pytest.raises(error, match=text):
        easydist.ray.Ranks(1000, resources={"rank": 1}, runtime_env=environment)
    assert alive() == before


def test_a_folder_that_is_too_large_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE", 10)
    (tmp_path / "module.py").write_text("a = 1\n" * 1000)
    with pytest.raises(ValueError, match=r"^Ranks: runtime_env: Failed to upload working_dir .* exceeds the maximum"):
        easydist.ray.Ranks(1, resources={"rank": 1}, runtime_env={"working_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("environment", "error", "text"),
    [
        ({"conda": "nowhere"}, RuntimeError, "^Ranks: a node cannot set up runtime_env for rank 0: "),
        (
            {"env_vars": {"PYTHONHOME": "/nowhere"}},  # Python ends before it can tell anything
            CollectiveTimeout,
            r"^Ranks: rank 0 of 1 did not start within 5 s, on free resources\nRay may still be preparing runtime_env",
        ),
    ],
    ids=["environment", "process"],
)
def test_ranks_that_do_not_start_on_free_resources_say_so(shared, environment, error, text):
    before = alive()
    with pytest.raises(error, match=text):
        easydist.ray.Ranks(1, resources={"rank": 1}, runtime_env=environment, timeout=5)
    assert alive() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size=0 is less than 1"),
        ({"size": 2.0}, "size=2.0 is not a number of ranks: pass an integer"),
        ({"size": 1, "strategy": "RANDOM"}, "strategy='RANDOM' is none of PACK, SPREAD,"),
        ({"size": 1, "resources": {}}, "name no amount of anything"),
        ({"size": 1, "resources": {"CPU": -1}}, "name no amount of anything"),
        ({"size": 1, "resources": {"CPU": "1"}}, "name no amount of anything"),
        ({"size": 1, "resources": {"CPU": float("nan")}}, "name no amount of anything"),
        ({"size": 1, "nodes": 1.0}, "nodes=1.0 is not a number of nodes: pass an integer"),
    ],
)
def test_impossible_ranks_are_refused_before_ray_starts(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        easydist.ray.Ranks(**options)


OWN_CONNECTIONS = """
import ray
import easydist.ray

def made():
    return easydist.ray.Ranks(1, resources={"rank": 0.25})

def closed(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        print(error)

first, second = made(), made()
first.close()
print(second.run(max, 1, 2))
ray.shutdown()
ray.init(log_to_driver=False, logging_level="ERROR")
closed(second.run, max, 1, 2)
closed(second.restart)
second.close()
print(ray.is_initialized())
ray.shutdown()
"""


def test_ranks_share_a_connection_and_belong_to_it(cluster, tmp_path):
    (tmp_path / "script.py").write_text(OWN_CONNECTIONS)
    out, _ = forked(tmp_path / "script.py", seconds=90, RAY_ADDRESS=cluster.address)
    assert out.splitlines() == ["[2]", CLOSED, CLOSED, "True"]


OF_ITS_JOB = """
import sys
import ray
import easydist.ray

ray.init(log_to_driver=False, logging_level="ERROR", runtime_env={"py_modules": [sys.argv[1]]})
with easydist.ray.Ranks(1, resources={"rank": 0.25}, ship=True) as ranks:
    print(ranks.run(eval, "__import__('own_module').NAME, sum('py_modules' in one for one in __import__('sys').path)"))
"""


def test_modules_of_the_job_are_beside_an_easydist_that_is_sent(cluster, tmp_path):
    (tmp_path / "sent" / "own_module").mkdir(parents=True)
    (tmp_path / "sent" / "own_module" / "__init__.py").write_text("NAME = 'own'")
    (tmp_path / "script.py").write_text(OF_ITS_JOB)
    out, _ = forked(tmp_path / "script.py", tmp_path / "sent" / "own_module", seconds=90, RAY_ADDRESS=cluster.address)
    assert out == "[('own', 2)]\n"
