"""``easydist top --on ray``: the ranks of a real Ray cluster in one table."""

import json
import os
import threading
import time

import launching
import pytest
from actors import HEAD, MARKS, travels
from click.testing import CliRunner
from test_top import rank_of

import easydist
from easydist.cli.main import main
from easydist.cli.ranks import grouped
from easydist.cli.top import screen

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = MARKS
travels(__name__)


def gathers_late(release):
    easydist.wait_for_everyone()
    while easydist.ProcessState().process_index == 1 and not os.path.exists(release):
        time.sleep(0.02)
    easydist.wait_for_everyone()


def top(cluster, *options):
    command = [launching.fork(), "-m", "easydist", "top", "--on", "ray", *options]
    process = launching.start(*command, env=os.environ | launching.OWN | {"RAY_ADDRESS": cluster.address})
    ((out, err),) = launching.finished(process)
    assert process.returncode == 0, err
    return out


def test_the_ranks_of_a_cluster_are_in_one_table(cluster, tmp_path):
    release = str(tmp_path / "release")
    with easydist.ray.Ranks(2, resources={"rank": 1}, timeout=launching.within(60)) as ranks:
        waits = threading.Thread(target=ranks.run, args=(gathers_late, release))
        waits.start()
        pids = [ranks._actors.facts[rank].pid for rank in range(2)]  # ranks of other tests are on this machine, too
        until = time.monotonic() + launching.within(30)
        while True:
            found = json.loads(top(cluster, "--json", "--stack"))
            mine = [one["ranks"] for one in found["groups"] if [rank["pid"] for rank in one["ranks"]] == pids]
            if mine and mine[0][0]["waits_for"] == [1] and mine[0][0]["seconds"] > 1:
                break
            assert time.monotonic() < until, found
        assert [(rank["host"], rank["is_in_call"]) for rank in mine[0]] == [(HEAD, True), (HEAD, False)]
        assert f"{pids[1]} on {HEAD}" in found["stacks"]
        table = top(cluster, "--once")
        assert f"{HEAD}  " in table
        assert str(pids[0]) in table
        open(release, "w").close()
        waits.join()


def test_ranks_of_several_hosts_are_one_group(capsys):
    from rich.console import Console

    groups = grouped([rank_of(1, last=0, in_call=False).at("10.0.0.2"), rank_of(0).at("10.0.0.1")])
    assert [[rank.host for rank in group] for group in groups] == [["10.0.0.1", "10.0.0.2"]]
    Console(width=160).print(screen(groups, {"101 on 10.0.0.2": "stack of it"}))
    said = capsys.readouterr().out
    first = next(line for line in said.splitlines() if " 100 " in line)
    assert first.split()[:4] == ["0", "10.0.0.1", "100", "0"]
    assert "pid 101 on 10.0.0.2\nstack of it" in said


def test_hosts_that_do_not_answer_are_named(capsys):
    from rich.console import Console

    Console(width=160).print(screen([], {}, ["10.0.0.3 did not answer within 5 s"]))
    assert "10.0.0.3 did not answer within 5 s" in capsys.readouterr().out


def test_a_job_cannot_be_chosen():
    done = CliRunner().invoke(main, ["top", "--on", "ray", "train.py"])
    assert done.exit_code == 2
    assert "--on ray shows all jobs" in done.output


WITHOUT_GRPC = """
import sys
sys.modules["grpc"] = None
from easydist.cli.main import main
main()
"""


@pytest.mark.parametrize("command", ["top", "check"])
def test_the_client_that_an_address_needs_is_not_installed(command):
    asked = ("-c", WITHOUT_GRPC, command, "--on", "ray")
    _, err = launching.forked(*asked, status=1, RAY_ADDRESS="ray://head:10001")
    assert err.strip() == (
        "Error: ray://head:10001 is an address for Ray's client, which needs grpcio: run pip install 'ray[client]'"
    )
