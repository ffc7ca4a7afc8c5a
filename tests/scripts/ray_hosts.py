"""Three ranks on three nodes of a Ray cluster that are hosts of their own. Prints outcomes as JSON, one line each.

The raylet of one node is killed, and the link of another one is cut.
"""

import json
import os
import threading

import psutil
import pytest
import ray
from hosts import NUMEL, check, crossed, normal, switch
from launching import within
from loss import others_wait

import easydist
import easydist.ray
from easydist import PeerLostError, ProcessState

SIZE = 3


def verbs():
    state, link = ProcessState(), os.environ["GLOO_SOCKET_IFNAME"]
    check(state.process_index, SIZE, 300_000)
    mine = normal(state.process_index, NUMEL)
    return {
        "address": ray.util.get_node_ip_address(),
        "store": os.environ["MASTER_ADDR"],
        "node": [state.node_rank, state.num_nodes, state.local_world_size],
        "broadcast": crossed(link, lambda: easydist.broadcast(mine)),
    }


def gathered():
    return easydist.gather(ProcessState().process_index).tolist()


def killed():
    """Kill the raylet of this rank, which ends with it."""
    raylet = psutil.Process(os.getppid())
    assert raylet.name() == "raylet"
    raylet.kill()
    threading.Event().wait()


def cut():
    """Take the node from the network, as if it had lost its power."""
    switch(os.environ["GLOO_SOCKET_IFNAME"], "down")
    threading.Event().wait()


def waits(victim, event):
    """Let something happen to the node of a rank while the others wait for it without a limit."""
    gathered()
    if ProcessState().process_index == victim:
        others_wait()
        event()
    gathered()


def loses(ranks, victim, event):
    """Run ``waits``, replace the rank, and return the error and where the ranks are afterwards."""
    process = ranks._actors.facts[victim]
    with pytest.raises(PeerLostError) as caught:
        ranks.run(waits, victim, event)
    ranks.restart([victim])
    return {
        "rank": caught.value.rank,
        "address": process.address,
        "is_its_process": (caught.value.pid, caught.value.host) == (process.pid, process.host),
        "text": str(caught.value),
        "after": [row["address"] for row in ranks.run(verbs)],
    }


def main():
    with easydist.ray.Ranks(SIZE, strategy="SPREAD", timeout=within(60)) as ranks:
        for found in ranks.run(verbs), loses(ranks, 1, killed), loses(ranks, 2, cut):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
