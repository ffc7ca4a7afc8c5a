"""An evaluation written with accelerate, and the one line that lets easydist move its data.

python examples/accelerate_script.py
accelerate launch --config_file examples/accelerate_cpu.yaml examples/accelerate_script.py  # see docs/launching.md
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import easydist.accelerate

easydist.accelerate.enable()  # the line

SAMPLES = 101


def main() -> None:
    """Count each sample once, whatever the number of ranks, and send the scalars of a step together."""
    accelerator = Accelerator(cpu=True)
    dataset = [{"x": torch.tensor([float(i)]), "id": f"sample-{i}"} for i in range(SAMPLES)]
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(dataset, batch_size=8))
    ids: list[str] = []
    for batch in loader:
        with torch.no_grad():
            outputs = model(batch["x"])
        rows = accelerator.gather_for_metrics({"outputs": outputs, "id": batch["id"]})  # text beside tensors
        assert len(rows["outputs"]) == len(rows["id"])
        ids += rows["id"]
    logs = accelerator.gather({"loss": 0.5 * accelerator.process_index, "rows": len(batch["id"])})  # one exchange
    assert ids == [sample["id"] for sample in dataset]
    accelerator.print(f"{accelerator.num_processes} ranks, {len(ids)} samples, loss {logs['loss'].mean():.2f}")


if __name__ == "__main__":
    main()
