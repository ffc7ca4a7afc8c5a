"""Runs Python's arguments in a fork of the fork server, and ends as that process ends.

Usage: python -IS forked.py FOLDER ARGUMENTS…, where ``FOLDER/socket`` is the server's.
"""

import json
import os
import signal
import socket
import sys


def ended(connection: socket.socket, arguments: list[str]) -> str:
    """Return the status of the process that got these arguments, or nothing if it is not known."""
    message = json.dumps([arguments, {**os.environ}, os.getcwd()]).encode()
    socket.send_fds(connection, [len(message).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(message)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    return connection.recv(16).decode()


def main(folder: str, *arguments: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{folder}/socket")
            status = os.waitstatus_to_exitcode(int(ended(connection, [*arguments])))
    except (OSError, ValueError) as error:
        with open(f"{folder}/stderr") as file:
            sys.exit(f"the fork server does not answer: {error!r}\n{file.read()}")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main(*sys.argv[1:])
