"""Drivers outside of the cluster, which reach it by ``ray://``."""

import json

import launching
import pytest
from actors import HEAD, MARKS

pytest.importorskip("grpc", reason="Ray's client needs grpcio: pip install 'ray[client]'")
pytestmark = MARKS

RANKS = """
import os, signal, threading
import torch, ray
import easydist, easydist.ray

def gathered():
    return easydist.gather(torch.tensor([easydist.ProcessState().process_index])).tolist()

def fails():
    if easydist.ProcessState().process_index == 1:
        raise LookupError("no such sample")
    gathered()

def dies():
    if easydist.ProcessState().process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered()

def never_comes(begun):
    if easydist.ProcessState().process_index == 1:
        open(begun, "w").close()
        threading.Event().wait()
    gathered()

class Member:
    pass

with easydist.ray.Ranks(2, resources={"rank": 1}) as ranks:
    assert ray.util.client.ray.is_connected()
    print(ranks.run(gathered))
    for call, kind in ((fails, easydist.RemoteError), (dies, easydist.PeerLostError)):
        try:
            ranks.run(call)
        except kind as error:
            print(type(error).__name__, error.rank)
    ranks.restart([1])
    print(ranks.run(gathered))
    os.mkfifo(begun := __file__ + ".begun")
    threading.Thread(target=lambda: (open(begun).read(), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        ranks.run(never_comes, begun)
    except KeyboardInterrupt:
        print(ranks.run(gathered))
    easydist.ray.create_group([ray.remote(num_cpus=0)(Member).remote() for _ in range(2)], "by_client")
print("closed")
"""

LOOKED_AT = """
import json, os, sys, threading
import easydist, easydist.ray

def waits(begun, release):
    easydist.wait_for_everyone()
    if easydist.ProcessState().process_index == 1:
        open(begun, "w").close()
        open(release).close()
    easydist.wait_for_everyone()
    return os.getpid()

begun, release = (__file__ + end for end in (".begun", ".release"))
os.mkfifo(begun)
os.mkfifo(release)
with easydist.ray.Ranks(2, resources={"rank": 1}) as ranks:
    results = []
    thread = threading.Thread(target=lambda: results.extend(ranks.run(waits, begun, release)))
    thread.start()
    open(begun).close()
    import subprocess
    looked = subprocess.run([sys.executable, "-m", "easydist", "top", "--on", "ray", "--json"], stdout=subprocess.PIPE)
    open(release, "w").close()
    thread.join()
    print(json.dumps([results, json.loads(looked.stdout)]))
"""

LOSES_ITS_SERVER = """
import sys
import psutil
from easydist.cli import top
from easydist.cli.main import main

def connected(connect=top._on_ray):
    ranks = connect()
    for process in psutil.process_iter(["cmdline"]):
        if {"--mode=specific-server", "--address=" + sys.argv[1]} <= {*process.info["cmdline"]}:
            process.kill()
    return ranks

top._on_ray = connected
main(["top", "--on", "ray", "--once"])
"""

CELLS = """
import easydist.notebook

ranks = easydist.notebook.start(2, on="ray", resources={"rank": 1})
ranks.execute("print(easydist.gather(rank).tolist())")
print([row.state for row in ranks.status()])
ranks.stop()
"""


def run(cluster, text, folder, *command, status=0):
    (folder / "script.py").write_text(text)
    return launching.forked(*command, folder / "script.py", seconds=90, status=status, RAY_ADDRESS=cluster.client)[0]


def test_ranks_run_fail_are_lost_and_interrupted(cluster, tmp_path):
    whole = "[[0, 1], [0, 1]]"
    said = [whole, "RemoteError 1", "PeerLostError 1", whole, whole, "closed"]
    assert run(cluster, RANKS, tmp_path).splitlines() == said


def test_a_script_shows_its_output_and_the_command_has_its_status(cluster, tmp_path):
    text = "import os, sys\nprint('a line')\nsys.exit(3 * int(os.environ['RANK']))"
    out = run(cluster, text, tmp_path, "-m", "easydist", "run", "--on", "ray", "-n", 2, status=3)
    assert sorted(out.splitlines()) == ["[rank 0] a line", "[rank 1] a line"]


def test_the_ranks_of_a_notebook(cluster, tmp_path):
    assert run(cluster, CELLS, tmp_path).splitlines() == ["ranks 0–1: [0, 1]", "['idle', 'idle']"]


def test_top_shows_ranks_on_the_nodes(cluster, tmp_path):
    pids, found = json.loads(run(cluster, LOOKED_AT, tmp_path).splitlines()[-1])
    (mine,) = [one["ranks"] for one in found["groups"] if [rank["pid"] for rank in one["ranks"]] == pids]
    assert [(rank["host"], rank["waits_for"]) for rank in mine] == [(HEAD, [1]), (HEAD, [])]


def test_top_loses_the_connection(cluster, tmp_path):
    (tmp_path / "script.py").write_text(LOSES_ITS_SERVER)
    own = {"RAY_ADDRESS": cluster.client}
    _, err = launching.forked(tmp_path / "script.py", cluster.address, status=1, seconds=90, **own)
    assert err.splitlines()[-1].startswith("Error: the connection to the cluster is lost: ")


def test_a_check_runs_on_the_nodes(cluster):
    command = ("-m", "easydist", "check", "--on", "ray", "-n", 2, "--json")
    out, _ = launching.forked(*command, seconds=90, RAY_ADDRESS=cluster.client)
    results = json.loads(out.splitlines()[-1])
    assert "2 ranks at " in next(row["said"] for row in results["findings"] if row["check"] == "rendezvous")
    assert not [row for row in results["findings"] if row["state"] == "fault"]


SENDS = """
import sys
import easydist.ray

with easydist.ray.Ranks(1, resources={"rank": 1}, ship=True, runtime_env={"working_dir": sys.argv[1]}) as ranks:
    print(ranks.run(eval, "__import__('beside').NAME, any('py_modules' in one for one in __import__('sys').path)"))
"""


def test_folders_are_sent_to_the_nodes(cluster, tmp_path):
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text(SENDS)
    sent = tmp_path / "script.py", tmp_path / "sent"
    assert launching.forked(*sent, seconds=90, RAY_ADDRESS=cluster.client)[0] == "[('beside', True)]\n"


def test_nobody_answers():
    address = f"ray://127.0.0.1:{launching.free_port()}"
    soon = {f"RAY_CLIENT_{name}_CONNECTION_TIMEOUT_S": 1 for name in ("INITIAL", "MAX")}
    for command in ("top", "check"):
        asked = ("-m", "easydist", command, "--on", "ray")
        _, err = launching.forked(*asked, status=1, RAY_ADDRESS=address, **soon)
        assert err.startswith(f"Error: no connection to {address}: ray client connection timeout\n")
