"""Compare easydist on CUDA tensors with accelerate over NCCL, and for weights with two usual ways, in turns.

python benchmarks/gpu.py [--ranks 2] [--seconds 1]

On a machine with fewer GPUs than ranks, the ranks share one and NCCL moves the data through sockets, which takes
milliseconds a message: then the ratios count messages and kernels, and say nothing about bandwidth.

The weights travel in a gloo group, as between Ray actors. The two ways are a broadcast of each tensor by way of the
CPU, and handles (CUDA IPC) of all tensors, pickled, from which the receivers copy. Below each table are the bounds:
nothing is slower than the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from bounds import Bound, show

import easydist
import easydist.weights
from easydist import ProcessState
from easydist.cli.measure import BenchRow, timed
from easydist.testing import Pool

ROUNDS = 5


def use_nccl(rank: int, world_size: int) -> None:
    """Replace the default group by one over NCCL, which takes each process for a host of its own."""
    store = dist.PrefixStore("nccl", dist.group.WORLD.get_group_store())
    dist.barrier()
    dist.destroy_process_group()
    ProcessState._reset_state()
    device = rank % torch.cuda.device_count()
    if world_size > torch.cuda.device_count():
        os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    os.environ.update(LOCAL_RANK=str(device), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size)


def works(rank: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield each piece of work: its name, ours, accelerate's."""
    from accelerate.utils import operations as peer

    def leaves(count: int, numel: int) -> dict[str, torch.Tensor]:
        return {f"leaf{i}": torch.full((numel, 2), float(rank), device="cuda") for i in range(count)}

    for name, tree in (
        ("10 small leaves", leaves(10, 8)),
        ("100 small leaves", leaves(100, 8)),
        ("4 x 8 MB", leaves(4, 1 << 20)),
    ):
        yield f"gather {name}", partial(easydist.gather, tree), partial(peer.gather, tree)
        yield f"broadcast {name}", partial(easydist.broadcast, tree), partial(peer.broadcast, tree)
        yield f"reduce {name}", partial(easydist.reduce, tree), partial(peer.reduce, tree)
    ragged = {"ids": torch.ones(8, 10 + rank, device="cuda"), "mask": torch.ones(8, 10 + rank, device="cuda")}
    yield (
        "pad + gather 2 ragged leaves",
        lambda: easydist.gather(easydist.pad_across_processes(ragged, dim=1)),
        lambda: peer.gather(peer.pad_across_processes(ragged, dim=1)),
    )


def weights(rank: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield each state dict and each way to compare with: its name, ours, the other."""
    for name, count, nbytes in (
        ("10 x 1 MB", 10, 1 << 20),
        ("300 x 4 MB", 300, 4 << 20),
        ("2000 x 64 KB", 2000, 1 << 16),
    ):
        state = {str(i): torch.full((nbytes // 2,), float(rank), device="cuda").bfloat16() for i in range(count)}
        ours = partial(easydist.weights.broadcast_state_dict, state)
        yield f"{name}, through the CPU", ours, partial(_by_cpu, state)
        yield f"{name}, handles", ours, partial(_by_handles, state)


def _by_cpu(state: dict[str, torch.Tensor]) -> None:
    for value in state.values():
        data = value.cpu().view(torch.uint8)
        dist.broadcast(data, 0)
        value.view(torch.uint8).copy_(data)


def _by_handles(state: dict[str, torch.Tensor]) -> None:
    is_source = dist.get_rank() == 0
    handles = [bytes(ForkingPickler.dumps([*state.values()]))] if is_source else [None]
    dist.broadcast_object_list(handles, 0)
    if not is_source:
        for value, other in zip(state.values(), ForkingPickler.loads(handles[0]), strict=True):
            value.copy_(other)
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, world_size: int, seconds: float, moves_weights: bool) -> list[BenchRow]:
    """Return the times of (ours, theirs) in several rounds, on this rank."""
    if not moves_weights:
        use_nccl(rank, world_size)
    from accelerate import PartialState

    PartialState()
    rows = []
    for name, *both in (weights if moves_weights else works)(rank):
        ours, theirs = [partial(_completed, call) for call in both]
        longest = torch.tensor([max(timed(call, 2) for call in (ours, theirs))])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        repeats = max(1, int(seconds / ROUNDS / 2 / longest.item()))
        rows.append((name, "the other", [(timed(ours, repeats), timed(theirs, repeats)) for _ in range(ROUNDS)]))
    PartialState._reset_state()
    return rows


def _completed(call: Callable[[], Any]) -> None:
    call()
    torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--seconds", type=float, default=1, help="for each piece of work, roughly")
    options = parser.parse_args()
    with Pool(timeout=300) as pool:
        for world_size in options.ranks:
            print(f"\n{world_size} ranks on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
            print(f"{'':32}{'easydist':>12}{'the other':>12}   the other / easydist: median (min to max)")
            rows = [
                pool.run(measure, world_size, seconds=options.seconds, moves_weights=one)[0] for one in (True, False)
            ]
            found: list[Bound] = []
            for name, _, rounds in rows[0] + rows[1]:
                ours, theirs = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
                ratios = sorted(their / our for our, their in rounds)
                spread = f"{statistics.median(ratios):6.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
                print(f"{name:32}{ours:9.0f} µs{theirs:9.0f} µs   {spread}")
                found.append(Bound(f"{name}: times as fast as the other", statistics.median(ratios), 1))
            show(found)


if __name__ == "__main__":
    main()
