"""Tests of hosts with links between them that take their time, or lose packets."""

import json
from pathlib import Path

import launching
import namespaces
import pytest
from wires import Wire

SCRIPT = Path(__file__).parent / "scripts" / "hosts.py"
GIGABIT = Wire(delay=0.01, rate=1.25e8, mtu=65535)
FAR = Wire(delay=0.1, rate=1.25e7)

pytestmark = pytest.mark.slow


def rows_of(hosts, per_host, wire, *cases):
    """Return what the ranks print, and the exit statuses of all, by case."""
    with namespaces.hosts(hosts, wire=wire) as pids:
        out, _ = launching.forked(SCRIPT, namespaces.LINK, per_host, *pids, *cases, seconds=200)
    found = {case: ([], []) for case in cases}
    for row in map(json.loads, out.splitlines()):
        ranks, statuses = found[row["case"]]
        ranks.append(row) if "rank" in row else statuses.extend(row["statuses"])
    return found


@pytest.mark.parametrize(
    ("hosts", "per_host"),
    [(2, 2), *(pytest.param(*size, marks=pytest.mark.battery) for size in [(2, 1), (4, 1), (4, 2)])],
)
def test_verbs_and_the_end_of_a_rank_over_links_of_a_gigabit_and_ten_milliseconds(hosts, per_host):
    size, kill = hosts * per_host, f"named/kill-{hosts * per_host - 1}"
    found = rows_of(hosts, per_host, GIGABIT, "named/verbs", "flat/verbs", kill)
    for case in ("named/verbs", "flat/verbs"):
        rows, statuses = found[case]
        assert statuses == [0] * size
        assert {row["backend"] for row in rows} == {"hierarchical" if case[0] == "n" and per_host > 1 else "gloo"}
    rows, statuses = found[kill]
    assert sorted(statuses) == [-9] + [0] * (size - 1)
    assert [row["type"] for row in rows] == ["PeerLostError"] * (size - 1)


@pytest.mark.parametrize(
    ("per_host", "loss"), [(1, 0.0), *(pytest.param(count, 0.2, marks=pytest.mark.battery) for count in (1, 2))]
)
def test_hosts_of_two_continents_meet_and_exchange_data(per_host, loss):
    size = 2 * per_host
    rows, statuses = rows_of(2, per_host, FAR._replace(loss=loss), "named/small")["named/small"]
    assert statuses == [0] * size
    assert [row["gathered"] for row in rows] == [[*range(size)]] * size
