"""The state of the process group after easydist's exit handlers have run.

python tests/scripts/leave.py FOLDER mine easydist later

A case says who created the final group: the script itself, before easydist; easydist; or the script, after destroying
the group of easydist. The ranks are forked, so that torch is loaded once.
"""

import atexit
import sys
from pathlib import Path

import torch.distributed as dist
from forking import forked, side_by_side, statuses

SIZE = 2


def leave(folder: Path, who: str, rank: int) -> None:
    @atexit.register  # the first to register is the last to run
    def look() -> None:
        (folder / f"{who}-{rank}").write_text(str(dist.is_initialized()))
        if dist.is_initialized():
            dist.destroy_process_group()

    def make() -> None:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}-{who}", SIZE), rank=rank, world_size=SIZE)

    if who == "mine":
        make()

    import easydist

    easydist.wait_for_everyone()
    if who == "later":
        easydist.ProcessState().destroy_process_group()
        make()
        easydist.wait_for_everyone()
    assert easydist.ProcessState().process_index == rank


def launch(folder: Path, who: str) -> None:
    """Fork the ranks and wait for them."""
    assert statuses(forked(SIZE, lambda rank: leave(folder, who, rank), whole=None)) == [0] * SIZE


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    side_by_side(len(cases), cases, lambda who: launch(Path(folder), who))
