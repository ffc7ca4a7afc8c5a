"""The error texts of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from easydist.data.packing import dtype_name
from easydist.weights.announced import Announced
from easydist.weights.target import Row

_SHOWN = 10


def _listed(lines: Sequence[str]) -> list[str]:
    return [*lines[:_SHOWN], *([f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]


def disagreement(operation: str, src: int, misfits: Mapping[int, Sequence[Row]], is_optimizer: bool) -> str:
    """Describe the entries of receivers or further sources that differ from the first source's, one per line."""
    lines: dict[str, str] = {}
    for rank, rows in misfits.items():
        for name, theirs, mine in rows:
            lines[name] = f"{lines.get(name, f'  {name}  rank {src}: {theirs}')}   rank {rank}: {mine}"
    title = f"{operation}: ranks disagree on {len(lines)} {'entry' if len(lines) == 1 else 'entries'}"
    advice = (
        "strict=False leaves out names that only one side has, filter= and rename= on either side change what is "
        "compared; shapes have to be equal."
    )
    if is_optimizer:
        advice = "Pass optimizers of one class, with the same parameters in the same groups and the same order."
    return "\n".join([title, *_listed([lines[name] for name in sorted(lines)]), f"Nothing was written. {advice}"])


def unlike(announced: Announced, mine: Announced) -> list[Row]:
    """Return the differences between the entries of a further source and those of the first one."""
    theirs, ours = ({one.name: f"{dtype_name(one.dtype)} {one.shape}" for one in a.entries} for a in (announced, mine))
    names = sorted(theirs.keys() | ours.keys())
    rows = [(name, theirs.get(name, "missing"), ours.get(name, "missing")) for name in names]
    return [row for row in rows if row[1] != row[2]]


def uncovered(operation: str, name: str, sources: Sequence[int]) -> str:
    """Say that the sources do not have all of an entry."""
    return (
        f"{operation}: ranks {list(sources)} together do not hold all of {name}\nPass src= all ranks of its mesh, and "
        "no others; each of them has to pass its own shards."
    )


def damaged(operation: str, names: Mapping[int, Sequence[str]]) -> str:
    """Say that received bytes differ from the sent ones."""
    lines = [f"  {name}  on rank {rank}" for rank, found in names.items() for name in found]
    return "\n".join(
        [
            f"{operation}: {len(lines)} tensors arrived with bytes that differ from those sent",
            *_listed(lines),
            "A source may have changed them in the meantime, or the connection is faulty. The targets have been "
            "overwritten.",
        ]
    )
