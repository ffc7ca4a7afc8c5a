"""Hosts that are namespaces of this machine: each has its own network, processes, mounts and name."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINK = "hosts0"
"""The interface by which a host reaches the others."""

_libc = ctypes.CDLL(None, use_errno=True)


def address(number):
    """Return the address of a host; they are numbered from 1."""
    return f"10.77.0.{number}"


def enter(pid, *names):
    """Enter the namespaces of a process."""
    for descriptor in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]:
        if _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


@contextlib.contextmanager
def hosts(count, private=None, wire=None):
    """Start hosts on one network, which end with this process.

    Args:
        count: Their number.
        private: A folder of which each has its own, empty at first.
        wire: The properties of their network (``wires.Wire``); None for one that takes no time.

    Yields:
        The pids of the processes that keep their namespaces.
    """
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("network namespaces need root, ip, nsenter and unshare")
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_host(number, private)) for number in range(1, count + 1)]
        stack.enter_context(_wired(pids, wire)) if wire else _link(pids)
        yield pids


@contextlib.contextmanager
def _host(number, private):
    mount = f"mount -t tmpfs none {private} && " if private else ""
    script = f"{mount}echo host{number} >/proc/sys/kernel/hostname && echo && exec cat"
    namespaces = ["--net", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"]
    with subprocess.Popen(
        ["unshare", *namespaces, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            if not process.stdout.readline():
                pytest.skip(f"no namespaces here: {process.stderr.read().decode().strip()}")
            yield process.pid
        finally:
            process.kill()


def _link(pids):
    """Connect hosts to a bridge, which is the interface of the first one."""
    first = pids[0]
    steps = [on(first, "ip", "link", "add", LINK, "type", "bridge")]
    for number, pid in enumerate(pids[1:], 2):
        port = f"{LINK}-{number}"
        ends = [port, "netns", str(first), "type", "veth", "peer", "name", LINK, "netns", str(pid)]
        steps += [["ip", "link", "add", *ends], on(first, "ip", "link", "set", port, "master", LINK, "up")]
    for number, pid in enumerate(pids, 1):
        steps += [on(pid, "ip", "addr", "add", f"{address(number)}/24", "dev", LINK)]
        steps += [on(pid, "ip", "link", "set", name, "up") for name in ("lo", LINK)]
    for step in steps:
        if (done := subprocess.run(step, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"no links between namespaces here: {done.stderr.strip()}")


@contextlib.contextmanager
def _wired(pids, wire):
    """Connect hosts by a process that passes on their packets."""
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("wires.py"), LINK, *map(str, wire), *map(str, pids)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as relay:
        if not relay.stdout.readline():
            pytest.skip(f"no TUN devices here: {relay.stderr.read().decode().strip()}")
        yield
        relay.stdin.close()


def on(pid, *command):
    """Return a command line that runs a command on a host, in the root folder."""
    names = {"net": "net", "mount": "mnt", "uts": "uts", "pid": "pid_for_children"}
    return ["nsenter", *(f"--{option}=/proc/{pid}/ns/{name}" for option, name in names.items()), *command]
