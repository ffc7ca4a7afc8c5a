"""A process that ends while gloo still waits in one of its threads."""

import launching
import pytest

SCRIPT = """
import os, signal, sys, time
import torch
from launching import free_port
from easydist.comms import ReduceOp, new_comm

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
rank = int(os.fork() == 0)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
comm = new_comm("gloo", torch.device("cpu"), "main")
mine = torch.tensor([os.getpid()])
pids = torch.empty(2, dtype=torch.int64)
comm.all_gather_single(pids, mine, async_op=False)
if rank == 1:
    os.closerange(0, 3)  # else the test would wait for this process, too
    signal.pause()
works = [BEGIN]

class EndsSlowly:
    # As defaults, since the interpreter has emptied the modules when this is called.
    def __del__(self, kill=os.kill, sleep=time.sleep, other=pids.tolist()[1], ends=signal.SIGKILL):
        kill(other, ends)
        sleep(1)  # while the interpreter ends: the wait ends now, because the connection breaks

sys.modules["ends_slowly"] = EndsSlowly()  # the pending wait keeps the script's own globals
"""
OPERATIONS = {
    "all_reduce": "comm.all_reduce(torch.ones(4), ReduceOp.SUM, async_op=True)",
    "recv": "comm.recv(torch.ones(4), 1, async_op=True)",
    "recv of much": "comm.recv(torch.ones(1 << 20), 1, async_op=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wait_of_gloo_does_not_abort_a_process_that_ends(name):
    launching.python("-c", SCRIPT.replace("BEGIN", OPERATIONS[name]))
