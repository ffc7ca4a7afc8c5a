"""``easydist top``: what it sees of ranks that wait, are late, talk two by two, or have ended."""

import dataclasses
import gc
import json
import os
import pty
import subprocess
import sys
import time

import launching
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import easydist
from easydist.cli.main import main
from easydist.cli.ranks import LocalRanks, Rank, as_json, awaited, jobs
from easydist.cli.top import late_ranks, screen
from easydist.liveness.page import OwnPage, PageEntry, PeerPage
from easydist.testing import distributed


def seen(condition, pid=None):
    """The ranks of a group as JSON, once they are as awaited; the group is one of this process, or of those of pid."""
    ranks, deadline = LocalRanks(pid or os.getpid()), time.monotonic() + launching.within(10)
    while time.monotonic() < deadline:
        for group in as_json(ranks.look()):
            rows = {row["rank"]: row for row in group["ranks"]}
            if condition(rows):
                return rows
    raise AssertionError(as_json(ranks.look()))


@distributed(world_size=3)
def test_ranks_that_wait_are_shown_with_whom_they_wait_for(rank):
    easydist.gather(torch.ones(1))
    if rank == 0:
        rows = seen(lambda rows: len(rows) == 3 and rows[1]["is_in_call"] and rows[2]["is_in_call"])
        assert [rows[i]["waits_for"] for i in range(3)] == [[], [0], [0]]
        assert [rows[i]["operation"] for i in range(3)] == ["gather", "reduce", "reduce"]
        assert rows[0]["call"] == rows[1]["call"] - 1 == rows[2]["call"] - 1
        assert {rows[i]["site"].partition(":")[0] for i in range(3)} == {"tests/cli/test_top.py"}
        assert rows[0]["pid"] == os.getpid()
        assert rows[0]["memory"] > 1 << 20
    assert easydist.reduce(torch.ones(1), "sum").item() == 3


@distributed(world_size=3)
def test_ranks_of_a_group_that_have_not_met_are_shown(rank):
    """A hang in the very first call is the most frequent one."""
    if rank == 0:
        rows = seen(
            lambda rows: [*rows] == [1, 2] and all(row["waits_for"] == [0] for row in rows.values()), os.getppid()
        )
        assert [row["call"] for row in rows.values()] == [1, 1]
    easydist.gather(torch.ones(1))


@distributed(world_size=3)
def test_a_call_between_two_ranks_waits_for_one(rank):
    easydist.gather(torch.ones(1))
    if rank == 1:
        easydist.send_tensor_dict({"a": torch.ones(1)}, dst=2)
    if rank == 2:
        rows = seen(lambda rows: len(rows) == 3 and rows[1]["is_in_call"])
        assert rows[1]["operation"] == "send_tensor_dict"
        assert rows[1]["waits_for"] == [2]
        easydist.recv_tensor_dict(src=1)
    easydist.wait_for_everyone()


def is_of_this_file(group):
    """Groups of earlier tests have the same names; some of them live as long as an exception that was kept."""
    return all(row["site"].startswith("tests/cli/test_top.py:") for row in group["ranks"])


@distributed(world_size=2)
def test_groups_are_apart(rank):
    pairs = dist.new_group([0, 1])
    easydist.gather(torch.ones(1))
    if rank == 0:
        rows = seen(
            lambda rows: [row["waits_for"] for row in rows.values()] == [[0]]
        )  # of which this rank knows nothing
        every = as_json(LocalRanks(os.getpid()).look())
        own = [group for group in every if group["size"] == 2]  # idle workers of the pool have groups of three still
        groups = {group["group"]: group["ranks"] for group in own if is_of_this_file(group)}
        assert [row["is_in_call"] for row in groups[dist.group.WORLD.group_name]] == [False, False]
        assert [row["pid"] for row in groups[pairs.group_name]] == [rows[1]["pid"]]
    easydist.gather(torch.ones(1), group=pairs)


@distributed(world_size=2)
def test_a_group_that_is_gone_is_not_shown(rank):
    def times_seen():
        return [told.group for told in PeerPage.find(os.getpid()).entries()].count(name)

    gc.collect()
    group = dist.new_group([0, 1])
    name = group.group_name
    before = times_seen()  # groups of earlier tests have the same names
    easydist.gather(torch.ones(1), group=group)
    assert times_seen() > 0
    dist.destroy_process_group(group)
    del group
    easydist.wait_for_everyone()  # the first call of another group lets go of it
    assert times_seen() <= before


@pytest.mark.slow
def test_a_forked_child_is_no_rank():
    """It has its parent's page open, too."""
    page = OwnPage()
    page.describe(page.new_entry(), "0", "", 0, 2)
    child = os.fork()
    if not child:
        os._exit(0 if PeerPage.find(os.getpid()) is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def rank_of(number, last=1, in_call=True, seconds=9.0, peer=None):
    told = PageEntry("0", "abc", number, 3, last, "gather, call 1, at a[b].py:1", in_call, peer, 0.0)
    return Rank(told, 100 + number, 1, "python", 0.0, 1 << 20, "running", seconds)


def test_who_cannot_be_seen_is_awaited():
    assert awaited([rank_of(0), rank_of(1)]) == {0: [2], 1: [2]}
    assert awaited([rank_of(0, peer=2)]) == {0: [2]}
    assert awaited([rank_of(0, peer=2), rank_of(2, peer=0)]) == {0: [], 2: []}


def test_late_is_who_lets_others_wait():
    late = rank_of(1, last=0, in_call=False)
    assert late_ranks([rank_of(0), late, rank_of(2)]) == [late]
    assert late_ranks([rank_of(0, seconds=0.1), late]) == []
    assert late_ranks([rank_of(0), rank_of(1)]) == []


def test_a_rank_between_calls_waits_for_none():
    assert awaited([rank_of(0, in_call=False), rank_of(1)]) == {0: [], 1: [2]}


def test_a_peer_is_awaited_until_it_is_in_a_call_with_the_rank():
    assert awaited([rank_of(0, peer=1), rank_of(1, peer=2), rank_of(2, peer=1)]) == {0: [1], 1: [], 2: []}
    assert awaited([rank_of(0, peer=1), rank_of(1, peer=0, in_call=False)]) == {0: [1], 1: []}
    assert awaited([rank_of(0, peer=1), rank_of(1), rank_of(2)]) == {0: [1], 1: [], 2: []}


def test_a_rank_that_itself_waits_is_not_late():
    late = rank_of(2, last=0, in_call=False)
    assert late_ranks([rank_of(0, last=2), rank_of(1), late]) == [late]


def test_a_rank_for_which_others_have_waited_a_second_is_late():
    late = rank_of(1, last=0, in_call=False)
    assert late_ranks([rank_of(0, seconds=1.0), late]) == [late]


def test_the_table_names_each_rank(capsys):
    from rich.console import Console

    Console(width=160).print(screen([[rank_of(0), rank_of(1, last=0, in_call=False)]], {101: "stack of it"}))
    said = capsys.readouterr().out
    first = next(line for line in said.splitlines() if " 100 " in line)
    assert first.split() == ["0", "100", "0", "1", "MiB", "1", "gather", "a[b].py:1", "1–2", "9.0", "s"]
    assert "not in a call, last: gather" in said
    assert "pid 101\nstack of it" in said


def of_job(parent, rank, name="0"):
    """The rank of another job: its process, launcher and command line are those of that job."""
    told = rank.entry._replace(group=name)
    command = f"train.py {parent}"
    return dataclasses.replace(rank, entry=told, pid=parent + told.rank, parent=parent, command=command)


def test_the_hung_job_is_first_and_idle_groups_take_a_line(capsys):
    from rich.console import Console

    busy = [[of_job(200, rank_of(number, seconds=0.1)) for number in range(3)]]
    idle = [[of_job(200, rank_of(number, in_call=False), name) for number in range(3)] for name in ("dp", "tp[0]")]
    hung = [[of_job(300, rank_of(0)), of_job(300, rank_of(1, last=0, in_call=False)), of_job(300, rank_of(2))]]
    Console(width=160).print(screen(busy + idle + hung, {}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    heads = [line for line in lines if line.startswith(("job", "group", "no call"))]
    assert heads == [
        "job 300: train.py 300",
        "group 0 of 3 ranks",
        "job 200: train.py 200",
        "group 0 of 3 ranks",
        "no call in progress: group dp of 3 ranks, group tp[0] of 3 ranks",
    ]
    assert [job[0][0].parent for job in jobs(busy + idle + hung)] == [200, 300]


def test_a_job_that_waits_for_a_rank_elsewhere_is_before_one_that_waits_for_none(capsys):
    from rich.console import Console

    idle = [[of_job(200, rank_of(number, in_call=False)) for number in range(3)]]
    hung = [[of_job(300, rank_of(0)), of_job(300, rank_of(2))]]  # rank 1 is on another host, or has ended
    Console(width=160).print(screen(idle + hung, {}))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("job")] == [
        "300:",
        "200:",
    ]


def test_a_job_alone_keeps_a_table_between_its_calls(capsys):
    from rich.console import Console

    Console(width=160).print(screen([[of_job(200, rank_of(number, in_call=False)) for number in range(3)]], {}))
    assert "not in a call, last: gather" in capsys.readouterr().out


def test_a_group_with_late_ranks_is_the_first_of_its_job(capsys):
    from rich.console import Console

    quick = [of_job(200, rank_of(number, seconds=0.1), "dp") for number in range(3)]
    stuck = [of_job(200, rank_of(0), "tp"), of_job(200, rank_of(1, last=0, in_call=False), "tp")]
    Console(width=160).print(screen([quick, stuck], {}))
    titles = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("group")]
    assert titles == ["tp", "dp"]


def test_a_job_is_found_by_a_rank_in_any_of_its_groups(monkeypatch):
    """The groups of ranks 0 and 1, and of ranks 1 and 2, are of one job; only rank 2 has the text."""
    told = [dataclasses.replace(of_job(200, rank_of(number), "a"), command="rest") for number in (1, 0)]
    told += [dataclasses.replace(of_job(200, rank_of(number), "b"), command="rest") for number in (1, 2)]
    told[-1] = dataclasses.replace(told[-1], command="train.py")
    other = dataclasses.replace(of_job(300, rank_of(0)), command="rest")
    monkeypatch.setattr(LocalRanks, "_found", lambda self: [*told, other])
    assert LocalRanks("train.py").look() == [[told[1], told[0]], told[2:]]
    assert LocalRanks("no such text").look() == []


def test_nobody_is_said(capsys):
    from rich.console import Console

    said = CliRunner().invoke(main, ["top", "0", "--once"])
    assert said.exit_code == 0
    assert said.output.startswith("None of your processes here is a rank of 0 that easydist knows")
    Console(width=160).print(screen([], {}))
    assert capsys.readouterr().out.startswith("None of your processes here is a rank that easydist knows")


@pytest.mark.slow
def test_a_terminal_that_cannot_be_rewritten_gets_one_table():
    """It would show nothing at all, until Ctrl-C."""
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "easydist", "top", "0"]
        subprocess.run(command, stdout=theirs, env=os.environ | {"TERM": "dumb"}, timeout=launching.within(20))
        assert os.read(ours, 100).startswith(b"None of your processes")
    finally:
        os.close(ours)
        os.close(theirs)


STUCK = """
import os, sys, torch, easydist
easydist.ProcessState(cpu=True)
easydist.gather(torch.ones(1))
if os.environ["RANK"] == "1":
    sys.stdin.read()
easydist.gather(torch.ones(1))
"""


@pytest.mark.slow
def test_a_job_that_hangs_is_seen_from_another_process(tmp_path):
    """Rank 1 reads what nobody writes; rank 0 is stopped in the end, and is seen nonetheless."""
    from test_env import easydist as command

    (tmp_path / "stuck.py").write_text(STUCK)
    env = {"PYTHONPATH": str(launching.ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env["EASYDIST_STACK_SIGNAL"] = "SIGUSR2"
    env |= {"MASTER_PORT": str(launching.free_port())}
    processes = [
        subprocess.Popen([sys.executable, tmp_path / "stuck.py"], env=os.environ | env | {"RANK": str(rank)}, stdin=-1)
        for rank in range(2)
    ]
    try:
        ranks, deadline = LocalRanks(processes[0].pid), time.monotonic() + launching.within(60)
        while not [row for rows in ranks.look() for row in late_ranks(rows)]:
            assert time.monotonic() < deadline
        found = {"stacks": {}}
        while not found["stacks"]:  # the ranks may just have been connected, and begin to wait again
            assert time.monotonic() < deadline
            found = json.loads(command("top", str(processes[0].pid), "--json", "--stack")[0])
        assert [row["waits_for"] for row in found["groups"][0]["ranks"]] == [[1], []]
        assert list(found["stacks"]) == [str(processes[1].pid)]
        out, _ = command("top", str(tmp_path / "stuck.py"), "--once")
        assert f": {sys.executable} {tmp_path / 'stuck.py'}\n" in out
        assert "job " in out
        assert "stuck.py" in found["stacks"][str(processes[1].pid)]
    finally:
        for job in processes:
            job.kill()
            job.communicate()
