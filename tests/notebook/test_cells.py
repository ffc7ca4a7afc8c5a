"""Cells on the ranks of a real notebook kernel: what they show, how they fail, and that ranks are not left waiting."""

import ast
import builtins
import re

import pytest
from notebook_kernels import kernel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nb():
    with kernel() as made:
        made.good("import easydist\ncluster = easydist.notebook.start(3)", 60)
        made.good("%%ranks\nimport torch.distributed as dist")
        yield made


def test_names_are_there_and_state_stays(nb):
    nb.good("%%ranks\nx = 10 * rank")
    shown = nb.good("%%ranks\n(x, world_size, torch.ones(1).dtype, easydist.ProcessState().num_processes)")
    assert shown.lines == [f"rank {r}: ({10 * r}, 3, torch.float32, 3)" for r in range(3)]


def test_a_reset_keeps_what_was_there_from_the_start(nb):
    nb.good("%%ranks\nother, rank = 1, 17\n%reset -f")
    shown = nb.good("%%ranks\n(rank, world_size, 'other' in globals(), easydist.gather(torch.ones(1)).tolist())")
    assert shown.lines == [f"rank {r}: ({r}, 3, False, [1.0, 1.0, 1.0])" for r in range(3)]
    assert nb.good("%%ranks\n%who").lines == ["ranks 0–2: Interactive namespace is empty."]
    nb.good("%%ranks\nimport torch.distributed as dist")  # for the other tests


def test_equal_lines_are_folded_and_others_come_by_rank(nb):
    shown = nb.good("%%ranks\nprint('begin')\nprint('I am', rank)\nif rank: print('not zero')\nprint('end', end='')")
    own = [f"rank {r}: I am {r}" for r in range(3)]
    assert shown.lines == ["ranks 0–2: begin", *own, "ranks 1–2: not zero", "ranks 0–2: end"]


def test_lines_come_while_the_cell_runs(nb):
    seen = []
    code = "%%ranks 1\nimport time\nprint('first')\nwhile not os.path.exists(path): time.sleep(0.01)\nprint('second')"
    nb.good("import tempfile\npath = tempfile.mktemp()\n%push path")
    nb.good("%%ranks\nimport os")
    path = nb.good("path").results[0]["text/plain"].strip("'")
    shown = nb.run(code, hook=lambda shown: "first" in shown.out and not seen and seen.append(open(path, "w").close()))
    assert shown.lines == ["rank 1: first", "rank 1: second"]


def test_values_show_once_where_they_are_equal(nb):
    assert nb.good("%%ranks\n6 * 7").lines == ["ranks 0–2: 42"]
    assert nb.good("%%ranks 0-1\nrank").lines == ["rank 0: 0", "rank 1: 1"]
    assert nb.good("%%ranks\nNone").lines == []
    assert nb.good("%%ranks\nrank;").lines == []
    assert nb.good("%%ranks\nrank  # ;").lines == [f"rank {r}: {r}" for r in range(3)]


def test_figures_and_progress_bars_of_one_rank_show(nb):
    shown = nb.good("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1])\nprint('drawn')", 60)
    assert ["image/png" in data for data in shown.displays] == [True]
    shown = nb.good("%%ranks\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass")
    bars = re.split(r"[\r\n]+", shown.err.strip())
    assert bars[-1].startswith("rank 0: 100%|")
    assert "rank 1" not in shown.err


def test_the_help_for_a_name_shows(nb):
    (page,) = nb.good("%%ranks\nlen?").displays
    assert "Return the number of items in a container." in page["text/plain"]


@pytest.mark.parametrize("call", ["easydist.gather(torch.ones(1))", "dist.all_reduce(torch.ones(1))"])
def test_an_exception_shows_once_and_releases_those_that_wait(nb, call):
    nb.good("%%ranks\nkept = rank")
    shown = nb.run(f"%%ranks\nif rank == 1:\n    raise ValueError('bad batch')\n{call}")
    text = shown.error
    assert text.count("ValueError: bad batch") == 1
    assert text.startswith("rank 1 raised\n")
    assert f"\nCell In[{shown.number}], line 3\n" in text
    operation = re.search(r"(\w+)\(", call)[1]
    assert text.endswith(f"\nranks 0, 2 waited for rank 1 in {operation}, cell line 4, and were released")
    assert nb.good("%%ranks\neasydist.gather(torch.tensor([kept])).tolist()").lines == ["ranks 0–2: [0, 1, 2]"]
    assert nb.good("%%ranks\ndist.all_reduce(t := torch.ones(1)); t.item()").lines == ["ranks 0–2: 3.0"]


def test_an_exception_on_all_ranks_shows_once(nb):
    text = nb.bad("%%ranks\ndef f():\n    return 1 / 0\nf()")
    assert text.startswith("ranks 0–2 raised\n")
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert "easydist/" not in text
    text = nb.bad("%%ranks\nraise ValueError(rank)")
    assert all(f"ValueError: {rank}" in text for rank in range(3))


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="needs Python 3.11")
def test_a_group_of_exceptions_is_an_error_with_the_users_part_of_its_members(nb):
    source = "async def f(): easydist.gather('text')\nasync with asyncio.TaskGroup() as tasks: tasks.create_task(f())"
    shown = nb.run(f"%%ranks\nimport asyncio\n{source}")
    assert shown.error.startswith("ranks 0–2 raised\n  + Exception Group Traceback (most recent call last):\n")
    assert f'"<cell {shown.number}>", line 3, in f\n' in shown.error
    assert shown.error.count("TypeError: gather: ") == 1
    assert "easydist/" not in shown.error
    assert not shown.err


def test_a_collective_that_others_do_not_join_is_an_error_that_says_so(nb):
    text = nb.bad("%%ranks 0,2\nprint(rank)\neasydist.gather(torch.ones(1))")
    assert text.splitlines()[1:] == [
        "ranks 0, 2 waited for rank 1, which does not run this cell, in gather, cell line 3, and were released"
    ]
    assert nb.good("%%ranks\neasydist.gather(torch.tensor([rank])).tolist()").lines == ["ranks 0–2: [0, 1, 2]"]
    assert "give ranks between 0 and 2" in nb.run("%%ranks 0,3\nrank").err


WAITS = {
    "gather": "print('ready')\nif rank == 1:\n    import time; time.sleep(600)\neasydist.gather(torch.ones(1))",
    "barrier": "print('ready')\nif rank == 1:\n    while True: pass\ndist.barrier()",
}


@pytest.mark.parametrize("operation", WAITS)
def test_interrupting_a_cell_interrupts_all_ranks(nb, operation):
    nb.good("%%ranks\nkept = rank")
    text = nb.interrupted_in(operation, f"%%ranks\n{WAITS[operation]}")
    assert text == "Interrupted on all ranks; their variables are kept."
    shown = nb.good("%%ranks\ndist.barrier()\neasydist.gather(torch.tensor([kept])).tolist()")
    assert shown.lines == ["ranks 0–2: [0, 1, 2]"]


def test_interrupting_a_cell_that_awaits(nb):
    text = nb.interrupted_in("", "%%ranks\nimport asyncio\nprint('ready')\nawait asyncio.sleep(600)")
    assert text == "Interrupted on all ranks; their variables are kept."
    assert nb.good("%%ranks\n1").lines == ["ranks 0–2: 1"]


TRAIN = """%%ranks
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
def step():
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), rank + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    return easydist.reduce(loss.detach(), "mean").item()
losses = [step() for _ in range(5)]
"""


def test_training_goes_on_after_a_cell_has_failed(nb):
    nb.good(TRAIN)
    nb.bad("%%ranks\nif rank == 2: raise ValueError\neasydist.gather(1.0)")
    nb.good("%%ranks\nlosses += [step() for _ in range(5)]")
    shown = nb.good("losses = %pull losses\nlosses")
    losses, *others = ast.literal_eval(shown.results[0]["text/plain"])
    assert all(other == losses for other in others)
    assert losses[-1] < losses[0]
    weights = "easydist.gather(model.module.weight.detach()).unique(dim=0).shape[0]"
    assert nb.good(f"%%ranks\n{weights}").lines == ["ranks 0–2: 1"]


def test_values_move_between_the_notebook_and_the_ranks(nb):
    nb.good("import torch\nweights = {'w': torch.arange(6.0).view(2, 3).t(), 'n': 3}\n%push weights")
    assert nb.good("%%ranks\n(weights['w'].sum().item(), weights['n'])").lines == ["ranks 0–2: (15.0, 3)"]
    nb.good("%%ranks\nweights['w'] *= rank; module = torch.nn.Linear(1, 1)")
    shown = nb.good("pulled = %pull weights\n[w['w'].sum().item() for w in pulled]")
    assert shown.results[0]["text/plain"] == "[0.0, 15.0, 30.0]"
    assert "cluster.pull('module', weights_only=False)" in nb.bad("%pull module")
    assert nb.good("len(cluster.pull('module', weights_only=False))").results[0]["text/plain"] == "3"
    assert "the notebook has no nothing" in nb.run("%push nothing").err
    assert "%push: name the variables to send" in nb.run("%push").err
    nb.good("ranks, self = [2], 5\n%push ranks self")  # names that cluster.push has itself
    assert nb.good("%%ranks\n(ranks, self)").lines == ["ranks 0–2: ([2], 5)"]


def test_values_that_cannot_move_to_the_notebook_are_named(nb):
    nb.good("%%ranks\nsteps = (step for step in [])")
    text = nb.bad("cluster.pull('steps', weights_only=False)")
    assert "steps cannot be sent to the notebook: it cannot be pickled" in text
    assert "Return or pull the values that it is made of" in text
    assert "the result of <lambda> cannot be sent to the notebook: it" in nb.bad("cluster.run(lambda: (_ for _ in []))")
    nb.good(
        "%%ranks\nimport sys, types\nonly_here = sys.modules['only_here'] = types.ModuleType('only_here')\n"
        "exec('class Own: pass', vars(only_here))\nown = only_here.Own()"
    )
    cause = "cannot be loaded in the notebook: ModuleNotFoundError: No module named 'only_here'. Return or pull values"
    assert nb.bad("cluster.pull('own', weights_only=False)").startswith(f"own on rank 0 {cause}")
    text = nb.bad("def own():\n    import only_here\n    return only_here.Own()\ncluster.run(own, ranks=[2])")
    assert text.startswith(f"the result of own on rank 2 {cause}")


def test_functions_run_on_the_ranks_with_the_globals_that_they_use(nb):
    nb.good(
        "import os, threading\nscale = 10\ndef f(x, plus=0):\n    return scale * x * int(os.environ['RANK']) + plus"
    )
    assert nb.good("cluster.run(f, 2, plus=1)").results[0]["text/plain"] == "[1, 21, 41]"
    assert nb.good("cluster.run(f, 2, ranks=[2])").results[0]["text/plain"] == "[40]"
    text = nb.bad("lock = threading.Lock()\ndef g():\n    return lock\ncluster.run(g)")
    assert "g cannot be sent to the ranks: lock, a lock, cannot be pickled" in text
    text = nb.bad("def h():\n    raise KeyError('here')\ncluster.run(h)")
    assert "raise KeyError('here')" in text


LOOK = """
import threading, time
seen = []
def look():
    status = None
    while status is None or (status.operation, status.waits_for) != ("gather", (1,)):  # at first also for rank 2
        time.sleep(0.01)
        status = cluster.status()[0]
    seen.append(status)
    cluster.interrupt()
looking = threading.Thread(target=look)
"""


def test_the_status_says_who_waits_for_whom(nb):
    nb.good(LOOK)
    nb.good("looking.start()")
    text = nb.bad("%%ranks\nimport time\nif rank == 1: time.sleep(600)\neasydist.gather(1.0)")
    assert text == "Interrupted on all ranks; their variables are kept."
    shown = nb.good("looking.join(); seen[0].state, seen[0].operation, seen[0].site, seen[0].waits_for")
    assert shown.results[0]["text/plain"] == "('waits', 'gather', 'cell line 4', (1,))"


def test_the_cluster_shows_as_a_table(nb):
    html = nb.good("cluster").results[0]["text/html"]
    assert html.count("<tr>") == 4
    assert html.count(">idle<") == 3
