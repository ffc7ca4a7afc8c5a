"""Ranks on hosts that are network namespaces with links between them. Each rank prints its outcome as JSON.

python tests/scripts/hosts.py LINK RANKS PID PID … named/verbs containers/kill-3 …

The processes PID own the namespaces of the hosts, each of which has RANKS ranks. A case is the way in which hosts are
distinguished (named: by EASYDIST_HOST_ID; containers: by their process namespaces; adopted: in the same way, in a group
that torch has made; shared: not at all; flat: without shared memory) and the event.
"""

import functools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forking import end, settle, statuses
from launching import within
from loss import DEADLINE, others_wait
from namespaces import address, enter

import easydist
from easydist import EasydistError, PeerLostError, ProcessState
from easydist.comms import new_comm
from easydist.liveness import keepalive, questions
from easydist.queue import MessageQueue

EVENTS = []
"""The two events of each case, the last one being this one: a host is gone; ranks of another one have noticed it."""

NUMEL = 1 << 20


def sent(link):
    """Return the bytes that this host has sent."""
    return moved(link)[8]


def received(link):
    """Return the bytes that this host has received."""
    return moved(link)[0]


def moved(link):
    rows = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line)
    return [*map(int, {name.strip(): numbers for name, numbers in rows}[link].split())]


def crossed(link, call):
    """Return the bytes that this host sends for a call of all ranks."""
    easydist.wait_for_everyone()
    before = sent(link)
    easydist.wait_for_everyone()
    call()
    easydist.wait_for_everyone()
    return sent(link) - before


def normal(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def small_integers(rank, numel):
    """Return floats whose sums are exact in any order."""
    return torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(rank)).float()


def check(rank, size, numel):
    """Check every verb against the result of one process."""
    tree = easydist.gather({"x": normal(rank, numel + rank), "y": [torch.full((2, 3), rank)]})
    assert torch.equal(tree["x"], torch.cat([normal(r, numel + r) for r in range(size)]))
    assert tree["y"][0][:, 0].tolist() == [r for r in range(size) for _ in range(2)]
    for src in range(size):
        assert torch.equal(easydist.broadcast(normal(rank, numel), from_process=src), normal(src, numel))
    total = sum(small_integers(r, numel) for r in range(size))
    assert torch.equal(easydist.reduce(small_integers(rank, numel), "sum"), total)
    assert torch.equal(easydist.reduce(small_integers(rank, numel), "mean"), total / size)
    every = easydist.gather_object({"rank": rank, "text": "x" * numel})
    assert every == [{"rank": r, "text": "x" * numel} for r in range(size)]


def verbs(link, rank, size):
    for numel in (0, 7, 300_000):
        check(rank, size, numel)
    mine = normal(rank, NUMEL)
    return {
        "backend": ProcessState().communicators().met().control.get_backend(),
        "node": [getattr(ProcessState(), name) for name in ("node_rank", "num_nodes", "local_world_size")],
        "gather": crossed(link, lambda: easydist.gather(mine)),
        "broadcast": crossed(link, lambda: easydist.broadcast(mine, from_process=1)),
        "limits": limits(),
    }


def small(rank, size):
    """Check every verb, and a message, with data of a few packets."""
    for numel in (0, 7):
        check(rank, size, numel)
    if rank == 0:
        easydist.send_tensor_dict({"x": normal(0, 7)}, size - 1)
    elif rank == size - 1:
        assert torch.equal(easydist.recv_tensor_dict(0)["x"], normal(0, 7))
    return {"gathered": easydist.gather(rank).tolist()}


def limits():
    """Return after how many seconds TCP asks the other host whether it is there."""
    easydist.wait_for_everyone()
    comm = new_comm("gloo", torch.device("cpu"), "second")
    every = [keepalive._get(one, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for one, _ in keepalive._connections()]
    easydist.wait_for_everyone()  # whoever ends its connections ends those of the others
    comm.finalize()
    return every


def kill(victim, rank, has_child):
    """Kill a rank while the others wait for it. A child that it has left may hold its connections."""
    pids = easydist.gather(os.getpid()).tolist()
    if rank == victim:
        if has_child and os.fork() == 0:
            os.close(1)
            os.close(2)
            signal.pause()  # until its host ends
        others_wait()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        easydist.gather(rank, timeout=DEADLINE)
    except EasydistError as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "pids": pids,
            "fields": vars(error) | {"raised_in": None},
        }


def cut(link, victim, rank):
    """Cut the link while the others wait."""
    easydist.gather(rank)
    if rank == victim:
        others_wait()
        switch(link, "down")
    try:
        easydist.gather(rank, timeout=within(1))
    except EasydistError as error:
        return {"type": type(error).__name__, "text": str(error)}


def switch(link, state):
    subprocess.run(["ip", "link", "set", link, state], check=True)


def gather_twice(rank):
    for _ in range(2):
        easydist.gather(rank, timeout=DEADLINE)


def vanish(link, victim, rank):
    """Take a host from the network, as if it had lost its power, while the others wait without a limit."""
    easydist.gather(rank)
    if rank == victim:
        others_wait()
        switch(link, "down")
    with pytest.raises(PeerLostError) as caught:
        gather_twice(rank)  # the others have sent what this host needs for the first one
    if rank == victim:
        switch(link, "up")
    return {"lost": caught.value.rank, "text": str(caught.value)}


def forsake(link, victim, rank):
    """Take a host with two ranks from the network; the others go on without both."""
    found = vanish(link, victim, rank)
    return found | (recovered(rank) if rank < 2 else {})


def recovered(rank):
    easydist.recover(timeout=3600)
    return {"gathered": easydist.gather(rank).tolist()}


def desert(link, victim, rank):
    """Take a host from the network whose ranks have yet to come to the recovery of the others."""
    easydist.gather(rank)
    (gone, noticed), found = EVENTS[-1], {}
    if rank == 0:
        until(gone)  # rank 1 has had an answer, and this one will have none
    if rank < 2:
        found = recovered(rank)
        noticed.set()
    elif rank == victim:
        switch_when_asked(link)
        gone.set()
        until(noticed)
        switch(link, "up")
    return found


def come(link, victim, rank):
    """Take a host from the network whose ranks have come to their first call, while another rank is late."""
    _, noticed = EVENTS[-1]
    if rank == 1:
        until(noticed)
    elif rank == victim:
        threading.Thread(target=switch_when_asked, args=(link,)).start()
    with pytest.raises(EasydistError) as caught:
        easydist.gather(rank, timeout=DEADLINE if rank < 2 else within(3))
    if rank == 0:
        noticed.set()
    elif rank == victim:
        until(noticed)
        switch(link, "up")
    return {"type": caught.typename, "text": str(caught.value)}


def sink(link, victim, rank):
    """Take a host from the network in the middle of a large message to it."""
    data = torch.ones(1 << 26)
    if rank == victim:
        threading.Thread(target=switch_midway, args=(link,)).start()
    with pytest.raises(PeerLostError) as caught:
        broadcast_and_gather(data)
    if rank == victim:
        switch(link, "up")
    return {"lost": caught.value.rank, "text": str(caught.value)}


def queue(link, victim, rank):
    """Take a host from the network while its readers wait for the other host's queue, and then the writer for them."""
    made = MessageQueue.create_from_process_group(None, max_chunk_bytes=1 << 20, max_chunks=4, writer_rank=0)
    made.broadcast_object("first" if rank == 0 else None)
    easydist.wait_for_everyone()
    if rank == victim:
        switch(link, "down")
    use = functools.partial(made.dequeue if rank else made.enqueue, *([] if rank else [torch.ones(1 << 16)]))
    with pytest.raises((PeerLostError, EOFError)) as caught:
        endlessly(use)
    made.close()
    if rank == victim:  # with the link, the writer's farewell comes to a reader that has not noticed yet
        until(EVENTS[-1][1])
        switch(link, "up")
    elif rank > victim:
        EVENTS[-1][1].set()
    return {"text": f"{caught.typename}: {caught.value}"}


def until(event):
    assert event.wait(2 * DEADLINE)


def switch_when_asked(link):
    """Take this host from the network once another one has asked whether it is there."""
    with socket.create_server(("", questions._PORT)) as listener, listener.accept()[0]:
        switch(link, "down")


def endlessly(use):
    while True:
        use(timeout=DEADLINE)


def broadcast_and_gather(data):
    easydist.broadcast(data, timeout=DEADLINE)
    easydist.gather(0, timeout=DEADLINE)  # rank 1 may have its data


def switch_midway(link):
    until = received(link) + (16 << 20)
    while received(link) < until:
        threading.Event().wait(0.001)
    switch(link, "down")


def blink(link, victim, rank):
    """Take a host from the network for a moment."""
    easydist.gather(rank)
    if rank == victim:
        others_wait()
        switch(link, "down")
        threading.Event().wait(keepalive.AFTER / 2)
        switch(link, "up")
    return {"gathered": easydist.gather(rank, timeout=DEADLINE).tolist()}


def work(case, link, rank, size):
    what = case.split("/")[1]
    if what.startswith(("cut", "vanish", "come", "desert", "forsake", "blink", "sink", "queue")):
        found = globals()[what[:-2]](link, int(what[-1]), rank)
    elif what == "verbs":
        found = verbs(link, rank, size)
    elif what == "small":
        found = small(rank, size)
    else:
        found = kill(int(what[-1]), rank, what.startswith("orphan"))
    os.write(1, (json.dumps({"case": case, "rank": rank, **(found or {})}) + "\n").encode())


def forks(count):
    """Fork processes. Return in each its number; in this one, after their end, None and their statuses."""
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            return number, []
        pids.append(pid)
    return None, statuses(pids)


def launch(number, case, link, per_host, pids):
    """Run one case. Return True in all processes but the first."""
    EVENTS.append((multiprocessing.Event(), multiprocessing.Event()))
    host, ended = forks(len(pids))
    if host is None:
        assert not any(ended)
        return False
    kind, size = case.split("/")[0], per_host * len(pids)
    enter(pids[host], "net", *(["pid_for_children", "mnt"] if kind in ("adopted", "containers") else []))
    local, ended = forks(per_host)
    if local is None:
        os.write(1, (json.dumps({"case": case, "host": host, "statuses": ended}) + "\n").encode())
        end()
    rank = per_host * host + local
    world = {"MASTER_ADDR": address(1), "MASTER_PORT": 29500 + number, "WORLD_SIZE": size}
    world |= {"RANK": rank, "LOCAL_RANK": local, "GLOO_SOCKET_IFNAME": link, "EASYDIST_SHM": int(kind != "flat")}
    world |= {"EASYDIST_HOST_ID": f"host {host}"} if kind == "named" else {}
    keepalive.AFTER = within(3 if "blink" in case else 1.5)  # it is read when the module is loaded, before the fork
    os.environ.update({name: str(value) for name, value in world.items()})
    if kind == "adopted":
        dist.init_process_group("gloo")
    work(case, link, rank, size)
    if rank:
        end()
    return True


def main(link, per_host, *arguments):
    pids, cases = [one for one in arguments if one.isdigit()], [one for one in arguments if not one.isdigit()]
    # It continues in its children.
    any(launch(number, case, link, int(per_host), pids) for number, case in enumerate(cases))


if __name__ == "__main__":
    settle()
    main(*sys.argv[1:])
