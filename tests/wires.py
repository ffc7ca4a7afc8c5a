"""A network between namespaces in which packets take their time, share a line, and get lost.

python tests/wires.py LINK DELAY RATE LOSS MTU PID PID …

The processes PID own the namespaces of the hosts. Each host gets an interface LINK, a TUN device, whose packets this
process passes on to the host of their address: DELAY seconds after the last byte has left the sender, whose line takes
RATE bytes a second. A share LOSS of the packets is dropped, by a fixed seed. It prints a line once the interfaces are
up, and ends with its input.
"""

import collections
import contextlib
import fcntl
import ipaddress
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import NamedTuple

from namespaces import address, enter, on

_TUNSETIFF = 0x400454CA
_TUN, _WITHOUT_INFORMATION = 0x0001, 0x1000
_DESTINATION = slice(16, 20)
"""The bytes of an IPv4 packet that hold the address of its receiver."""


class Wire(NamedTuple):
    """The properties of the line of each host.

    Attributes:
        delay: The seconds for which a packet is under way.
        rate: The bytes that a host sends per second.
        loss: The share of the packets that get lost.
        mtu: The most bytes of a packet; fewer packets are less work for the relay.
    """

    delay: float = 0.0
    rate: float = 1.25e8
    loss: float = 0.0
    mtu: int = 1500


class _Line:
    """The line of one host, from the device that its packets leave."""

    def __init__(self, link, pid):
        enter(pid, "net")
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH22x", link.encode(), _TUN | _WITHOUT_INFORMATION))
        self.waiting, self._is_free = collections.deque(), 0.0

    def take(self, wire, chance):
        """Take a packet from the device, which comes out at its time unless it gets lost."""
        packet = os.read(self.device, 1 << 16)
        if packet[0] >> 4 != 4 or chance < wire.loss:
            return
        self._is_free = max(self._is_free, time.monotonic()) + len(packet) / wire.rate
        self.waiting.append((self._is_free + wire.delay, packet))

    def arrived(self, now):
        """Yield the packets whose time has come."""
        while self.waiting and self.waiting[0][0] <= now:
            yield self.waiting.popleft()[1]


def relay(lines, wire):
    """Pass packets on, from each line to the one of their address, until the input ends.

    Args:
        lines: The lines by the address of their host, as four bytes.
        wire: Their properties.
    """
    chances, by_device = random.Random(0), {line.device: line for line in lines.values()}
    while True:
        due = min((line.waiting[0][0] for line in lines.values() if line.waiting), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for ready in select.select([0, *by_device], [], [], timeout)[0]:
            if ready == 0:
                return
            by_device[ready].take(wire, chances.random())
        now = time.monotonic()
        for line in lines.values():
            for packet in line.arrived(now):
                with contextlib.suppress(KeyError, OSError):  # no host has this address, or its interface is down
                    os.write(lines[packet[_DESTINATION]].device, packet)


def main(link, delay, rate, loss, mtu, *pids):
    lines = {}
    for number, pid in enumerate(pids, 1):
        lines[ipaddress.ip_address(address(number)).packed] = _Line(link, pid)
        for step in (
            ["addr", "add", f"{address(number)}/24", "dev", link],
            ["link", "set", link, "mtu", mtu, "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run(on(pid, "ip", *step), check=True)
    print(flush=True)
    relay(lines, Wire(float(delay), float(rate), float(loss)))


if __name__ == "__main__":
    main(*sys.argv[1:])
