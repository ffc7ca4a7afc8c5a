"""Tests of the resources that ranks leave behind, and of two hosts that are network namespaces with a link."""

import json
import re
from pathlib import Path

import launching
import namespaces
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
SHARED_FOLDERS = ["/dev/shm", "/run/shm", "/tmp"]

pytestmark = pytest.mark.slow


def run(script, *arguments, **environment):
    """Run a script, kill everything it started, and return the rows that it prints, one per line."""
    out, _ = launching.forked(SCRIPTS / script, *arguments, seconds=90, **environment)
    return [json.loads(line) for line in out.splitlines()]


# Leftovers.

ENDS = {
    "gloo": ["exit", "raise", "kill", "kill_all", "orphan", "fork", "fork_exit"],
    "easydist_shm": ["exit", "raise", "kill", "kill_all", "orphan", "fork", "fork_exit"],
    "queue": ["exit", "raise", "kill", "kill_first", "kill_all", "fork_exit"],
}
ENDED = launching.sampled([f"{kind}/{end}" for kind, ends in ENDS.items() for end in ends], 3)
AGAIN = launching.sampled(["gloo/again", "easydist_shm/again"])
STATUS = {"raise": 1, "kill": -9, "kill_first": -9, "kill_all": -9, "orphan": -9}
"""The exit status of a rank that fails."""

MET = {"gloo": {"RemoteError"}, "easydist_shm": {"RemoteError"}, "queue": {"EOFError", "BrokenPipeError"}}
"""The errors of the others after a rank raised."""

LOST = {"PeerLostError"}, {"PeerLostError", "EOFError"}
"""Their errors after it was killed; the second set if a writer has already seen that and closed its end."""


def names():
    """Return files with a name where shared memory can have one. Folders belong to other tests."""
    return {path for folder in SHARED_FOLDERS for path in Path(folder).glob("*easydist*") if not path.is_dir()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return for each case the outcomes of its ranks, their exit statuses and leftovers; and files with new names."""
    folder, temporary = tmp_path_factory.mktemp("met"), tmp_path_factory.mktemp("temporary")
    before = names()
    rows = run("leaks.py", folder, *AGAIN, *ENDED, GLOO_SOCKET_IFNAME="lo", TMPDIR=str(temporary))
    return {row["case"]: row for row in rows}, [*(names() - before), *temporary.iterdir()]


@pytest.mark.parametrize("case", ENDED + AGAIN)
def test_no_process_and_no_folder_has_the_memory_of_ranks_that_have_ended(case, ended):
    found = ended[0][case]
    assert found["files"] > len(found["statuses"])  # a page of each rank, and their shared memory
    assert found["left"] == []


def test_nothing_has_got_a_name(ended):
    assert ended[1] == []


@pytest.mark.parametrize("case", [case for case in ENDED if case.split("/")[1] in STATUS])
def test_survivors_keep_nothing_of_a_group_that_broke(case, ended):
    kind, how = case.split("/")
    met = MET[kind] if how == "raise" else LOST[kind == "queue" and how != "kill_first"]
    found = ended[0][case]
    survivors = [rank for rank in range(3) if found["statuses"][rank] == 0]
    assert [status for status in found["statuses"] if status] == [STATUS[how]] * (3 - len(survivors))
    assert sorted(row["rank"] for row in found["ranks"]) == survivors
    assert len(survivors) == (0 if how == "kill_all" else 2)
    for row in found["ranks"]:
        assert row["met"] in met
        assert row["more"] == {}


@pytest.mark.parametrize("case", [case for case in ENDED if case.split("/")[1] not in STATUS])
def test_ranks_work_on_beside_children_and_end_without_cleanup(case, ended):
    found = ended[0][case]
    assert found["statuses"] == [0, 0, 0]
    assert [row["gathered"] for row in found["ranks"]] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("case", AGAIN)
def test_groups_made_again_and_again_take_no_more_than_the_first(case, ended):
    found = ended[0][case]
    assert found["statuses"] == [0, 0]
    for row in found["ranks"]:
        assert row["more"] == {}
        assert -1 not in row["slots"]  # numbers of groups that are gone are used again


# Two hosts.

KILLED = launching.sampled([("containers/orphan", 2), ("named/kill", 3), ("containers/kill", 2)], 3)
VANISHED = launching.sampled(["named/vanish-0", "named/vanish-3", "containers/vanish-2", "named/sink-2"], 4)
HOSTS = ["named/verbs", "flat/verbs", "shared/verbs", "containers/verbs", *VANISHED]
HOSTS += [f"{case}-{victim}" for case, victim in KILLED]
HOSTS += launching.sampled(["named/queue-2", "named/blink-3", "adopted/verbs"], 3)
HOSTS += ["named/come-3", "named/forsake-2", "named/desert-3"]
HOSTS += ["named/cut-3"]  # the last one, since it cuts the link


@pytest.fixture(scope="module")
def on_two_hosts():
    """Return for each case the outcomes of its ranks, in order, and their exit statuses, host by host."""
    with namespaces.hosts(2) as pids:
        rows = run("hosts.py", namespaces.LINK, 2, *pids, *HOSTS)
    found = {case: ({}, {}) for case in HOSTS}
    for row in rows:
        by_rank, statuses = found[row["case"]]
        if "rank" in row:
            by_rank[row["rank"]] = row
        else:
            statuses[row["host"]] = row["statuses"]
    return {case: ([by_rank[r] for r in sorted(by_rank)], ends[0] + ends[1]) for case, (by_rank, ends) in found.items()}


@pytest.mark.parametrize(
    ("kind", "backend", "hosts"),
    [("named", "hierarchical", 2), ("containers", "hierarchical", 2), ("shared", "shm", 1), ("flat", "gloo", 1)],
)
def test_verbs_on_two_hosts(kind, backend, hosts, on_two_hosts):
    rows, statuses = on_two_hosts[f"{kind}/verbs"]
    assert statuses == [0, 0, 0, 0]
    assert [row["backend"] for row in rows] == [backend] * 4
    assert [row["node"] for row in rows] == [[rank * hosts // 4, hosts, 4 // hosts] for rank in range(4)]


def crossed(rows, verb):
    """Return the bytes that went over the link in both directions, as counted by the first rank of each host."""
    return rows[0][verb] + rows[2][verb]


@pytest.mark.parametrize("verb", ["gather", "broadcast"])
def test_bytes_over_the_link(verb, on_two_hosts):
    flat, *others = [crossed(on_two_hosts[f"{k}/verbs"][0], verb) for k in ("flat", "named", "containers", "shared")]
    # Each of two ranks on the other host gets all data of two ranks; that of one comes in parts, from all four.
    assert flat > {"gather": 4, "broadcast": 2}[verb] * (4 << 20)
    assert max(others[:2]) < (1 / 2 + 0.2) * flat
    assert others[2] < 0.01 * flat


@pytest.mark.parametrize(("case", "victim"), KILLED)
def test_rank_of_another_host_that_is_killed(case, victim, on_two_hosts):
    rows, statuses = on_two_hosts[f"{case}-{victim}"]
    assert statuses == [-9 if rank == victim else 0 for rank in range(4)]
    assert [row["rank"] for row in rows] == [rank for rank in range(4) if rank != victim]
    for row in rows:
        assert row["type"] == "PeerLostError", row["text"]
        assert f"rank {victim} is lost" in row["text"]
        assert (row["fields"]["rank"], row["fields"]["pid"]) == (victim, row["pids"][victim])


def test_a_host_that_has_lost_the_store_says_so(on_two_hosts):
    rows, statuses = on_two_hosts["named/cut-3"]
    assert statuses == [0, 0, 0, 0]
    assert {row["type"] for row in rows} == {"CollectiveTimeout"}
    assert ["has lost the store at 10.77.0.1:" in row["text"] for row in rows] == [False, False, True, True]
    assert all("\nThis host (" in row["text"] for row in rows[2:])


@pytest.mark.parametrize("case", VANISHED)
def test_a_host_that_vanishes_is_named_by_the_others(case, on_two_hosts):
    rows, statuses = on_two_hosts[case]
    assert statuses == [0, 0, 0, 0]
    assert [row["lost"] // 2 for row in rows] == [1, 1, 0, 0]
    for row in rows:
        assert re.search(r": its host has not answered for [\d.]+ s; that host, or the network, is down\n", row["text"])


def test_a_host_that_vanishes_while_ranks_wait_for_a_late_one_is_named(on_two_hosts):
    rows, statuses = on_two_hosts["named/come-3"]
    assert statuses == [0, 0, 0, 0]
    assert [row["type"] for row in rows] == ["PeerLostError"] * 2 + ["CollectiveTimeout"] * 2
    assert rows[0]["text"].splitlines()[0] == rows[1]["text"].splitlines()[0]
    assert re.match(r"gather: rank 2 is lost: .*: its host has not answered for [\d.]+ s; that host", rows[0]["text"])


@pytest.mark.parametrize("case", ["named/forsake-2", "named/desert-3"])
def test_ranks_recover_at_once_without_a_host_that_vanishes(case, on_two_hosts):
    """The host vanishes before they recover, or while they wait for its ranks. No time limit is near."""
    rows, statuses = on_two_hosts[case]
    assert statuses == [0, 0, 0, 0]
    assert [row.get("gathered") for row in rows] == [[0, 1], [0, 1], None, None]


def test_both_ends_of_a_queue_notice_that_a_host_vanishes(on_two_hosts):
    rows, statuses = on_two_hosts["named/queue-2"]
    assert statuses == [0, 0, 0, 0]
    assert re.match(r"PeerLostError: MessageQueue: reader [23] is lost", rows[0]["text"])
    assert re.match(r"EOFError: MessageQueue: the writer, .*, has closed the queue", rows[1]["text"])
    assert all(row["text"].startswith("PeerLostError: MessageQueue: the writer is lost") for row in rows[2:])


@pytest.mark.parametrize("kind", ["named", "containers", pytest.param("adopted", marks=pytest.mark.battery)])
def test_every_connection_between_hosts_has_a_limit(kind, on_two_hosts):
    rows, statuses = on_two_hosts[f"{kind}/verbs"]
    assert statuses == [0, 0, 0, 0]
    for row in rows:
        assert len(row["limits"]) > 3  # those of two groups to two ranks each
        assert len({*row["limits"]}) == 1
        assert 1 <= row["limits"][0] < 1000


@pytest.mark.battery
def test_a_host_that_vanishes_for_a_moment_ends_nothing(on_two_hosts):
    rows, statuses = on_two_hosts["named/blink-3"]
    assert statuses == [0, 0, 0, 0]
    assert [row["gathered"] for row in rows] == [[0, 1, 2, 3]] * 4
