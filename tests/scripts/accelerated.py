"""One rank of an accelerate script, with easydist enabled before or after ``Accelerator()``.

Usage: accelerate launch accelerated.py FOLDER before|after

Each rank writes its results to ``FOLDER/RANK.json``.
"""

import json
import sys
import warnings
from pathlib import Path

import accelerate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
)
from accelerate.utils.operations import DistributedOperationException

import easydist.accelerate


def exchanged(accelerator):
    """Return the results of the methods and the functions. The ranks have different numbers of rows."""
    rank = accelerator.process_index
    rows = torch.arange(rank + 1) + 10 * rank
    return {
        "method": accelerator.gather({"x": rows, "array": np.full(1, rank), "step": rank}),
        "gather": gather(rows),
        "padded": accelerator.pad_across_processes(rows > 0, pad_index=1).dtype == torch.bool,
        "function": pad_across_processes(rows, dim=0),
        "sum": accelerator.reduce(torch.tensor([rank, 1], dtype=torch.uint8)),
        "mean": reduce({"loss": float(rank)}),
        "broadcast": broadcast({"x": torch.tensor([float(rank)])}),
        "objects": gather_object([f"rank {rank}"]),
        "list": broadcast_object_list([rank, "same"]),
    }


def refused(accelerator):
    """Return the error that a script catches by accelerate's name, and the place where it happened."""
    wrong = torch.zeros(2, 2 + accelerator.process_index)
    try:
        accelerator.gather(wrong)
    except DistributedOperationException as error:
        return str(error)
    return "nothing"


def evaluated(accelerator):
    """Return the data collected in a loop over 11 samples on 2 or 4 ranks, whose samplers repeat some."""
    data = [{"x": torch.tensor([float(i)]), "index": i} for i in range(11)]
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    found = {"tensors": [], "names": [], "columns": [], "rows": [], "after": []}
    for batch in loader:
        x, index, names = batch["x"], batch["index"], [f"n{i}" for i in batch["index"].tolist()]
        found["tensors"] += accelerator.gather_for_metrics({"index": index, "x": x})["index"].tolist()
        found["names"] += accelerator.gather_for_metrics(names)
        found["columns"] += accelerator.gather_for_metrics({"x": x, "names": names, "array": x.numpy()})["names"]
        found["rows"] += [int(row) for row in accelerator.gather_for_metrics(index, use_gather_object=True)]
        found["after"] += index.tolist()
    found["exact"] = accelerator.gather_for_metrics(torch.tensor(found["after"]), loader=loader).tolist()
    found["sorted"] = accelerator.gather_for_metrics(torch.tensor(found["after"]), indices=found["after"]).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found["guessed"] = accelerator.gather_for_metrics(torch.tensor(found["after"])).tolist()
    return found | {"warnings": [str(warning.message) for warning in caught]}


def batches(accelerator, **options):
    """Return the rows that a loop over a prepared loader yields on this rank."""
    data = [{"x": torch.tensor([float(i)]), "index": i} for i in range(11)]
    configured = accelerate.DataLoaderConfiguration(**options)
    accelerator = Accelerator(cpu=True, dataloader_config=configured)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    with easydist.trace() as trace:
        found = [index for batch in loader for index in batch["index"].tolist()]
    return {"rows": found, "calls": sorted({call.operation for call in trace.calls})}


def main(folder, order):
    if order == "before":
        easydist.accelerate.enable()
    accelerator = Accelerator(cpu=True)
    easydist.accelerate.enable()
    set_seed(0)
    found = {
        "rank": accelerator.process_index,
        "exchanged": easydist.listify(exchanged(accelerator)),
        "refused": refused(accelerator),
        "evaluated": evaluated(accelerator),
        "sharded": batches(accelerator),
        "dispatched": batches(accelerator, dispatch_batches=True),
    }
    accelerator.wait_for_everyone()
    easydist.accelerate.disable()
    found["after"] = [f.__wrapped__.__module__ for f in (gather, accelerate.utils.reduce)]
    found["theirs"] = accelerator.gather(torch.ones(1)).tolist()
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()  # a thread of torch's gloo that still drops tensors when Python ends aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
