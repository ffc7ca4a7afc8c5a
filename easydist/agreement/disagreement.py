"""The texts of errors that all ranks raise together, made from the descriptions of all ranks' calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SAME = "Pass the same structure, dtypes and shapes on every rank."
PLAIN = (
    "Text, None and other plain values beside tensors are not sent, so they must be equal on all ranks. Gather "
    "those that differ with gather_object (gather_for_metrics in an evaluation loop), or leave them out."
)
DEVICES = "Move them to the same type of device on every rank: tensors on GPUs travel over NCCL, those on CPUs do not."
Row = tuple[str, str, str]
"""A leaf that does not fit where it arrives: its path, its description on the source, and the local one."""

SHOWN = 10
"""The most rows, ranks of a row and the like in a text; the others are counted."""


def fault_text(faults: dict[int, dict[str, Any]]) -> str:
    """Return the text about failed ranks: the fault of each, and the sites of their calls."""
    first = faults[min(faults)]
    lines = _lines({rank: one["text"] for rank, one in faults.items()})
    if first["body"]:
        return "\n".join([f"{first['operation']}: the body raised on {_ranks(faults)}", *lines])
    sites = _sites_text({rank: one["site"] for rank, one in faults.items()})
    advice = "Nothing was changed, and the group keeps working. Fix the error on that rank."
    return "\n".join([f"{first['operation']}: {_ranks(faults)} failed before the exchange", *lines, sites, advice])


def _ranks(ranks: Iterable[int]) -> str:
    """Return the words for some ranks: ``rank 2``, ``ranks 0, 1``."""
    names = list(map(str, ranks))
    shown = [*names[:SHOWN], f"{len(names) - SHOWN} more"] if len(names) > SHOWN + 1 else names
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(shown)}"


def _sites_text(sites: dict[int, str]) -> str:
    """Return a line with the sites of the call, and with the ranks at each site if there are several."""
    by_site: dict[str, list[int]] = {}
    for rank, site in sites.items():
        by_site.setdefault(site, []).append(rank)
    if len(by_site) == 1:
        return f"Called at {next(iter(by_site))}"
    return "Called at " + ", ".join(_first([f"{site} ({_ranks(ranks)})" for site, ranks in by_site.items()]))


def calls_text(every: list[dict[str, Any]]) -> str:
    """Return the text about different calls."""
    lines = _lines({rank: f"{one['title']} at {one['site']}" for rank, one in enumerate(every)})
    advice = "Every rank of the group has to make the same calls in the same order."
    return "\n".join(["ranks made different calls", *lines, advice])


def trees_text(every: list[dict[str, Any]]) -> str:
    """Return the text about leaves that differ, with one line for each leaf and its type on every rank."""
    present = [(rank, one) for rank, one in enumerate(every) if not one["absent"]]
    fixed_rows = {rank: _by_path(one["fixed"]) for rank, one in present}
    full_rows = {rank: _by_path(one["types"]) for rank, one in present}
    paths = sorted(set().union(*fixed_rows.values()))
    differing = [
        path
        for path in paths
        if any(rows.get(path) != fixed_rows[present[0][0]].get(path) for rows in fixed_rows.values())
    ]
    lines = [
        f"  {path or 'the value'}  {_by_rank({r: _leaf_text(rows.get(path)) for r, rows in full_rows.items()})}"
        for path in differing[:SHOWN]
    ]
    if len(differing) > SHOWN:
        lines.append(f"  … and {len(differing) - SHOWN} more")
    first = present[0][1]
    head = f"{first['operation']}: ranks disagree on {len(differing)} of {len(paths)} leaves"
    if any(row and row[1] is None for path in differing for row in (rows.get(path) for rows in fixed_rows.values())):
        return "\n".join([head, *lines, _sites_of(every), PLAIN])
    return "\n".join([head, *lines, _sites_of(every), _advice([*fixed_rows.values()], differing, first["advice"])])


def misfit_lines(source: str, misfits: Mapping[int, Sequence[Row]], receiver: str = "rank") -> list[str]:
    """Return a line for each misfit, sorted: the description on the source, and on each rank where it does not fit.

    Args:
        source: The words for the source, such as ``rank 0``.
        misfits: The misfits of each rank that has some.
        receiver: The words before the number of such a rank.
    """
    lines: dict[str, str] = {}
    for rank, rows in misfits.items():
        for path, theirs, mine in rows:
            start = lines.get(path, f"  {path or 'the value'}  {source}: {theirs}")
            lines[path] = f"{start}   {receiver} {rank}: {mine}"
    return [lines[path] for path in sorted(lines)]


def listed(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and a line with the number of the others."""
    return _first(lines, "  ")


def _first(texts: Sequence[str], indent: str = "") -> list[str]:
    """Return the first texts, and one with the number of the others."""
    return [*texts[:SHOWN], *([f"{indent}… and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else [])]


def values_text(head: str, rows: Mapping[str, Sequence[str]], more: int, sites: Sequence[str]) -> str:
    """Return the text about values that differ.

    Args:
        head: The first line.
        rows: The text of the value on each rank, by path.
        more: The number of values that differ and are not among the rows.
        sites: The site of each rank's call.
    """
    lines = [f"  {where}  {_by_text(dict(enumerate(texts)))}" for where, texts in rows.items()]
    if more:
        lines.append(f"  … and {more} more")
    return "\n".join([head, *lines, _sites_text(dict(enumerate(sites)))])


def _by_path(rows: Iterable[list[Any]]) -> dict[str, list[Any]]:
    """Return the leaves by path; a path that several keys with the same repr have is numbered."""
    counts: Counter[str] = Counter()
    found = {}
    for path, *row in rows:
        counts[path] += 1
        found[path if counts[path] == 1 else f"{path}#{counts[path]}"] = row
    return found


def _sites_of(every: list[dict[str, Any]]) -> str:
    """Return a line with the sites of all ranks' calls."""
    return _sites_text({rank: one["site"] for rank, one in enumerate(every)})


def _by_rank(texts: dict[int, str]) -> str:
    """Return the text of each rank; larger groups list ranks with the same text together."""
    if len(texts) <= SHOWN:
        return "   ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return _by_text(texts)


def _by_text(texts: dict[int, str]) -> str:
    """Return each text with the ranks that have it."""
    return "   ".join(_first(_grouped(texts)))


def _lines(texts: dict[int, str]) -> list[str]:
    """Return a line for each rank; of many ranks, those with the same text have one line."""
    if len(texts) <= SHOWN:
        return [f"  rank {rank}: {text}" for rank, text in texts.items()]
    return listed([f"  {text}" for text in _grouped(texts)])


def _grouped(texts: dict[int, str]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return [f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items()]


def _leaf_text(row: list[Any] | None) -> str:
    if row is None:
        return "missing"
    return row[0] if row[1] is None else f"{row[0]} {tuple(row[1])}"


def _advice(ranks: Sequence[Mapping[str, list[Any]]], differing: Sequence[str], about_dim: str) -> str:
    """Return what to do about leaves that differ between ranks."""
    if all(len({_off_device(rows.get(path)) for rows in ranks}) == 1 for path in differing):
        return DEVICES
    dim = _differing_dim([rows.get(differing[0]) for rows in ranks])
    return SAME if dim is None else about_dim.format(dim=dim)


def _off_device(row: list[Any] | None) -> str:
    """Return the text of a leaf without its device."""
    return _leaf_text(row and [row[0].partition(" on ")[0], row[1]])


def _differing_dim(rows: list[list[Any] | None]) -> int | None:
    """Return the first dimension in which the shapes differ; None if dtypes or numbers of dimensions differ."""
    known = [row for row in rows if row and row[1] is not None]
    if len(known) < len(rows) or len({row[0] for row in known}) > 1 or len({len(row[1]) for row in known}) > 1:
        return None
    sizes = zip(*(row[1] for row in known), strict=True)
    return next((dim for dim, column in enumerate(sizes) if len(set(column)) > 1), None)
