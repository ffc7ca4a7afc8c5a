"""The world that a rank finds, written to a file by a process that ends without any cleanup."""

import json
import sys
import warnings
from pathlib import Path

import torch


def main(folder: str, *options: str) -> None:
    if "accelerate-first" in options:
        import accelerate

        accelerate.PartialState(cpu=True)
    adopted = torch.distributed.is_initialized()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import easydist

        state = easydist.PartialState()
        gathered = easydist.gather({"rank": torch.tensor([state.process_index])})["rank"].tolist()
    if not adopted:  # a destroyed group is created again
        state.destroy_process_group()
        assert easydist.gather(torch.tensor([state.process_index])).tolist() == gathered
    found = {
        "rank": state.process_index,
        "size": state.num_processes,
        "local_rank": state.local_process_index,
        "node": [state.node_rank, state.num_nodes, state.local_world_size],
        "gathered": gathered,
        "adopted": adopted,
        "warnings": [str(warning.message) for warning in caught if warning.category is RuntimeWarning],
    }
    Path(folder, f"{state.process_index}-of-{state.num_processes}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
