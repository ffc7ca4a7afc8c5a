"""A process that ends while gloo still waits in its threads."""

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
works = [
    comm.all_reduce(torch.ones(4), ReduceOp.SUM, async_op=True),
    comm.recv(torch.ones(4), 1, async_op=True),
    comm.recv(torch.ones(1 << 20), 1, async_op=True),
]

class EndsSlowly:
    # As defaults, since the interpreter has emptied the modules when this is called.
    def __del__(self, kill=os.kill, sleep=time.sleep, other=pids.tolist()[1], ends=signal.SIGKILL):
        kill(other, ends)
        sleep(1)  # while the interpreter ends: the waits end now, because the connection breaks

sys.modules["ends_slowly"] = EndsSlowly()  # the pending waits keep the script's own globals
"""


@pytest.mark.slow
def test_waits_of_gloo_do_not_abort_a_process_that_ends():
    launching.python("-c", SCRIPT)
