"""Scripts that launch ranks of their own, in many cases at once."""

import json
import os
import subprocess
import sys


def launched(script, cases):
    """Of each case what every rank met, by rank, and how the ranks ended; and all that went to stderr."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    found = {}
    for row in map(json.loads, done.stdout.splitlines()):
        rows, statuses = found.setdefault(row["case"], ({}, []))
        if "rank" in row:
            rows[row["rank"]] = row
        else:
            statuses += row["statuses"]
    assert done.returncode == 0, done.stderr
    return found, done.stderr
