"""Ranks, packages and errors in texts for people."""

from __future__ import annotations

import traceback
from collections.abc import Iterable


def counted(size: int) -> str:
    """Return a number of ranks, and the ranks.

    Example:
        >>> counted(1), counted(4)
        ('1 rank (0)', '4 ranks (0–3)')
    """
    return "1 rank (0)" if size == 1 else f"{size} ranks (0–{size - 1})"


def some(count: int, one: str, several: str) -> str:
    """Return a number of things.

    Example:
        >>> some(1, "row", "rows"), some(3, "leaf", "leaves")
        ('1 row', '3 leaves')
    """
    return f"{count} {one if count == 1 else several}"


def a_or_an(noun: str) -> str:
    """Return a noun, such as the name of a class, with its article.

    Example:
        >>> a_or_an("set"), a_or_an("int"), a_or_an("UserList")
        ('a set', 'an int', 'a UserList')
    """
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def numbers(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example:
        >>> numbers([3, 4, 5, 1])
        '1, 3–5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def named(ranks: Iterable[int]) -> str:
    """Return ranks as text, after the word that fits their number.

    Example:
        >>> named([1]), named([0, 1, 2, 3]), named([0, 2])
        ('rank 1', 'ranks 0–3', 'ranks 0, 2')
    """
    listed = [*ranks]
    return f"{'rank' if len(listed) == 1 else 'ranks'} {numbers(listed)}"


def duration(seconds: float) -> str:
    """Return a time with three digits, or whole seconds.

    Example:
        >>> duration(0.25), duration(1863.2)
        ('0.25 s', '1863 s')
    """
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def reason(error: BaseException) -> str:
    """Return the text of an error, or its name if it has none, as Ctrl-C.

    Example:
        >>> reason(ValueError("too long")), reason(KeyboardInterrupt())
        ('too long', 'KeyboardInterrupt()')
    """
    return str(error) or repr(error)


def needs(part: str, package: str, extra: str) -> str:
    """Return which package a part of easydist lacks, and how to install it with the extra that names it.

    Example:
        >>> needs("easydist.ray.Ranks", "ray", "ray")
        "easydist.ray.Ranks needs ray: run pip install '.[ray]' in the checkout of easydist"
    """
    return f"{part} needs {package}: run pip install '.[{extra}]' in the checkout of easydist"


def trace(error: BaseException, caller: str) -> str:
    """Return the traceback; for a bare assertion, with the values of the local variables.

    Args:
        error: The exception.
        caller: The file that has called the function. The traceback begins below it.
    """
    bare = isinstance(error, AssertionError) and not error.args
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == caller:
        frames = frames.tb_next
    return "".join(traceback.TracebackException(type(error), error, frames, capture_locals=bare).format())
