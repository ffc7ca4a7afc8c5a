"""Call verbs on two ranks in a torch that lacks one of its private names. Prints a line for each name.

python tests/scripts/without_names.py torch._C._has_storage …
"""

import importlib.abc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # the ranks need it; each of them would take seconds to load it
import torch.distributed as dist
import torch.distributed.fsdp
from forking import settle, statuses
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

PACKAGE = Path(__file__).parents[2] / "easydist" / "base"
TEXTS = {f"easydist.base.{name}": (PACKAGE / f"{name}.py").read_text() for name in ("torch_private", "torch_groups")}
LACKING = "torch.no_such_name"


class Without(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module in which a name stands with another one in its place, which torch does not have."""

    def __init__(self, name: str) -> None:
        self.name = name
        (self.module,) = (module for module, text in TEXTS.items() if f'"{name}"' in text)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        text = TEXTS[self.module]
        assert text.count(f'"{self.name}"') == 1
        exec(text.replace(f'"{self.name}"', f'"{LACKING}"'), module.__dict__)


def check(rank: int) -> None:
    """Make calls of each kind, and compare what comes with what one process would compute."""
    import easydist
    from easydist.base import torch_private

    tree = {"x": torch.full((3,), float(rank)), "y": [torch.arange(4).view(2, 2).t() + rank, True], "n": rank + 1.5}
    for _ in range(4):  # later calls recognise the tensors of earlier ones
        gathered = easydist.gather({"x": tree["x"], "y": tree["y"][0]})
        assert torch.equal(gathered["x"], torch.tensor([0.0, 0, 0, 1, 1, 1]))
        assert torch.equal(easydist.reduce(tree["x"], "sum"), torch.ones(3))
        assert torch.equal(easydist.broadcast({"x": tree["x"].clone()})["x"], torch.zeros(3))
    assert easydist.gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    x = torch.full((2,), float(rank), requires_grad=True)
    easydist.gather(x, differentiable=True).square().sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 4.0 * rank))
    if rank == 0:
        easydist.send_tensor_dict(tree, dst=1)
    else:
        assert easydist.recv_tensor_dict(src=0)["n"] == 1.5
    into = {"x": torch.ones(3), "bits": torch.zeros(2, dtype=torch.bfloat16)}
    easydist.broadcast_tensor_dict(into if rank else {"x": torch.zeros(3), "bits": torch.ones(2, dtype=torch.bfloat16)})
    refused(lambda: easydist.gather(torch.empty(2, device="meta")))
    refused(lambda: easydist.gather(torch.ones(2).to_sparse()))
    with FakeTensorMode():
        refused(lambda: easydist.gather(torch.ones(2)))
        assert isinstance(torch.ones(2), FakeTensor)  # the mode goes on
    refused(lambda: torch.vmap(lambda x: easydist.gather(x))(torch.ones(2, 2)))
    refused(lambda: easydist.gather(TwoTensor(torch.ones(2), torch.ones(2))))
    assert easydist.gather(torch.ones(1)).tolist() == [1, 1]
    for _ in range(2):  # groups that torch has forgotten, too
        group = dist.new_group([0, 1])
        assert easydist.gather(torch.full((1,), float(rank)), group=group).tolist() == [0, 1]
        assert easydist.broadcast(torch.full((1,), float(rank)), from_process=1, group=group).tolist() == [1]
        dist.destroy_process_group(group)
    assert torch_private.missing() == [LACKING]


def refused(call: Callable[[], object]) -> None:
    """Check that a call is an error on all ranks."""
    try:
        call()
    except Exception:
        return
    raise AssertionError("no error")


def forked(work: Callable[[], None]) -> int:
    """Fork a process that does this, and return its pid."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def ranks_without(name: str, store: str) -> None:
    """Load easydist once, and fork two ranks."""
    sys.meta_path.insert(0, Without(name))
    torch.set_num_threads(1)
    import easydist

    for verb in ("gather", "reduce", "broadcast", "gather_object", "send_tensor_dict", "broadcast_tensor_dict"):
        getattr(easydist, verb)

    def rank(number: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=number, world_size=2, timeout=timedelta(seconds=60)
        )
        check(number)
        dist.destroy_process_group()

    assert statuses([forked(partial(rank, number)) for number in range(2)]) == [0, 0]


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            ended = statuses([forked(partial(ranks_without, name, f"{folder}/{number}"))])
            print(f"{name}: {'works' if ended == [0] else 'breaks'}", flush=True)


if __name__ == "__main__":
    settle()
    main(sys.argv[1:])
