"""Compare gathering in an evaluation loop of 200 batches: easydist, accelerate and torchmetrics in one run.

python benchmarks/metrics.py [--ranks 2 4] [--batches 200] [--rounds 5] [--only TEXT]

Every batch has nested outputs and a text id per sample. Only the time spent in gathering counts, not that of loading.
For each loop it prints the median time of both, and the peer's time over easydist's: median, min and max of the rounds.
easydist uses shared memory, or gloo with EASYDIST_SHM=0, which the peers always use.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from bounds import Bound, show
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC

import easydist
from easydist import metrics
from easydist.testing import Pool

BATCH_SIZE = 8


class Loop(NamedTuple):
    """One row of the table. Both functions return the seconds that they have spent in gathering."""

    name: str
    ours: Callable[[], float]
    theirs: Callable[[], float]
    peer: str


class Timed:
    """A function with a sum of the seconds of all its calls."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.seconds, self._fn = 0.0, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._fn(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result


def outputs(indices: torch.Tensor) -> dict[str, Any]:
    """Return a model's output for a batch."""
    x = indices.float()
    boxes = {"xyxy": x[:, None] * torch.ones(4), "score": x / 7}
    return {"logits": x[:, None] * torch.ones(10), "loss": x / 3, "label": indices % 10, "boxes": boxes}


def ids(indices: torch.Tensor) -> list[str]:
    """Return the ids of a batch."""
    return [f"sample-{i:06d}" for i in indices.tolist()]


def loop_of_ours(total: int, group: dist.ProcessGroup) -> float:
    """Call gather_for_metrics once per batch, with text."""
    loader = metrics.distributed_loader(range(total), BATCH_SIZE, group=group)
    gather = Timed(functools.partial(easydist.gather_for_metrics, loader=loader, group=group))
    rows = 0
    for indices in loader:
        rows += len(gather(outputs(indices) | {"id": ids(indices)})["id"])
    assert rows == total
    return gather.seconds


def loop_collected(total: int, group: dist.ProcessGroup) -> float:
    """Keep the same columns on their rank, and join them once at the end."""
    loader = metrics.distributed_loader(range(total), BATCH_SIZE, group=group)
    collector = easydist.MetricCollector(total, group=group)
    update, compute = Timed(collector.update), Timed(collector.compute)
    for indices in loader:
        update(indices, id=ids(indices), **outputs(indices))
    assert len(compute()["id"]) == total
    return update.seconds + compute.seconds


def loop_of_accelerate(total: int) -> float:
    """Call it twice per batch, as it does not accept tensors and text together."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(total), BATCH_SIZE))
    gather, rows = Timed(accelerator.gather_for_metrics), 0
    for indices in loader:
        gather(outputs(indices))
        rows += len(gather(ids(indices), use_gather_object=True))
    assert rows == total
    return gather.seconds


def batches(count: int, rank: int) -> Iterable[torch.Tensor]:
    """Return the indices of one rank's batches."""
    return (torch.arange(BATCH_SIZE) + BATCH_SIZE * (rank + step) for step in range(count))


def means_of_ours(count: int, rank: int, group: dist.ProcessGroup) -> float:
    """Compute ten means, known on every rank at every step."""
    means = {f"m{i}": metrics.WeightedMean() for i in range(10)}
    compute = Timed(functools.partial(metrics.compute, group=group))
    for indices in batches(count, rank):
        for mean in means.values():
            mean.update(indices / 3, 1)
        compute(means)
    return compute.seconds


def means_of_torchmetrics(count: int, rank: int) -> float:
    """Compute the same means. A sync of torchmetrics gathers once per state, and a mean has two."""
    means = MetricCollection({f"m{i}": MeanMetric(sync_on_compute=False) for i in range(10)}, compute_groups=False)
    sync = Timed(lambda: [mean.sync() for mean in means.values()])
    for indices in batches(count, rank):
        means.update(indices / 3, 1)
        sync()
        for mean in means.values():
            mean.unsync()
    return sync.seconds


def curve(count: int, rank: int) -> BinaryAUROC:
    """Return a metric that keeps all predictions."""
    metric = BinaryAUROC(sync_on_compute=False)
    for indices in batches(count, rank):
        metric.update(indices / 1e6, indices % 2)
    dist.barrier()  # otherwise the call would include the wait for the slowest rank
    return metric


def curve_of_ours(count: int, rank: int, group: dist.ProcessGroup) -> float:
    """Gather all predictions of a loop at its end."""
    metric, gather = curve(count, rank), Timed(lambda state: easydist.gather(state, group=group))
    gather({"preds": torch.cat(metric.preds), "target": torch.cat(metric.target)})
    return gather.seconds


def curve_of_torchmetrics(count: int, rank: int) -> float:
    """Gather the same predictions with the metric's own sync."""
    sync = Timed(curve(count, rank).sync)
    sync()
    return sync.seconds


def loops(rank: int, world_size: int, count: int) -> Iterable[Loop]:
    """Yield all rows."""
    total = count * BATCH_SIZE * world_size - 5
    for name, way in (("shared memory", "1"), ("gloo", "0")):
        group = dist.new_group()
        with mock.patch.dict(os.environ, EASYDIST_SHM=way):
            easydist.gather(rank, group=group)  # the ranks meet, with the setting that applies now
        for title, ours in (("", loop_of_ours), (", collected", loop_collected)):
            yield Loop(
                f"{count} batches{title}, {name}",
                functools.partial(ours, total, group),
                functools.partial(loop_of_accelerate, total),
                "accelerate",
            )
        for title, ours, theirs in (
            ("ten means a step", means_of_ours, means_of_torchmetrics),
            ("predictions at the end", curve_of_ours, curve_of_torchmetrics),
        ):
            yield Loop(
                f"{title}, {name}",
                functools.partial(ours, count, rank, group),
                functools.partial(theirs, count, rank),
                "torchmetrics",
            )


def measure(
    rank: int, world_size: int, count: int, rounds: int, only: str
) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Return the times of (ours, theirs) in several rounds, on this rank."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    from accelerate.state import AcceleratorState

    rows = []
    for loop in loops(rank, world_size, count):
        if only not in loop.name:
            continue
        loop.ours(), loop.theirs()  # creates connections and memory
        rows.append((loop.name, loop.peer, [(loop.ours(), loop.theirs()) for _ in range(rounds)]))
    AcceleratorState._reset_state(reset_partial_state=True)
    return rows


def report(world_size: int, rows: list[tuple[str, str, list[tuple[float, float]]]]) -> None:
    """Print the table of one world size, from rank 0's times."""
    print(f"\n{world_size} ranks, {os.cpu_count()} cores")
    print(f"{'':38}{'easydist':>12}{'peer':>12}   peer / easydist: median (min to max)")
    for name, peer, rounds in rows:
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [their / our for our, their in rounds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{name:38}{ours * 1e3:9.2f} ms{theirs * 1e3:9.2f} ms   {statistics.median(ratios):6.1f} ({spread}) {peer}"
        )
    show(
        Bound(f"{name}, beside {peer}", statistics.median(their / our for our, their in rounds), 1.0)
        for name, peer, rounds in rows
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            asked = {"count": options.batches, "rounds": options.rounds, "only": options.only}
            report(world_size, pool.run(measure, world_size, **asked)[0])


if __name__ == "__main__":
    main()
