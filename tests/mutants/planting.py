"""Faults planted in the sources, one at a time, to see whether the tests of their room notice them.

``make mutants`` (``PYTHONPATH=tests python -m mutants.planting [ROOM …]``) runs the tests that each fault names on a
copy of the checkout that has the fault. They have to fail, or not to end in time.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import importlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("easydist", "tests", "examples", "docs", "benchmarks", "setup.cfg", "setup.py", "README.md", "Makefile")
SHARE = 0.85
"""The faults that have to be noticed, in each room."""


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        file: Its file in ``easydist/``.
        where: The function, with its class; empty for the whole file.
        old: The text that it replaces, which occurs once there.
        new: The text in its place.
        tests: What notices it: arguments of pytest.
    """

    file: str
    where: str
    old: str
    new: str
    tests: str


def rooms():
    """Return the faults by room."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    found = {name: importlib.import_module(f"mutants.{name}") for name in names if name not in ("planting", "__init__")}
    return {name: module.MUTANTS for name, module in found.items() if hasattr(module, "MUTANTS")}


def planted(mutant):
    """Return the text of the file with the fault.

    Raises:
        LookupError: The text that it replaces is not there, or more than once.
    """
    text = (ROOT / "easydist" / mutant.file).read_text()
    first, last = _lines(text, mutant)
    lines = text.splitlines(keepends=True)
    part = "".join(lines[first:last])
    if part.count(mutant.old) != 1 or mutant.old == mutant.new:
        raise LookupError(f"{mutant.file}: {mutant.where or 'the file'} has not one place for {mutant.old!r}")
    return "".join([*lines[:first], part.replace(mutant.old, mutant.new), *lines[last:]])


_parsed = functools.cache(ast.parse)


def _lines(text, mutant):
    """Return the lines of the function."""
    node, lines = _parsed(text), text.count("\n") + 1
    if not mutant.where:
        return 0, lines
    for name in mutant.where.split("."):
        node = next((one for one in ast.walk(node) if getattr(one, "name", None) == name), None)
        if node is None:
            raise LookupError(f"{mutant.file}: there is no {mutant.where}")
    decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
    return min([node.lineno, *decorators]) - 1, node.end_lineno


def noticed(mutant, folder, seconds):
    """Run the tests of a fault in a copy of the checkout; return what came of it."""
    file = folder / "easydist" / mutant.file
    before = file.read_text()
    file.write_text(planted(mutant))
    try:
        return _outcome(mutant, folder, seconds)
    finally:
        file.write_text(before)


def _outcome(mutant, folder, seconds):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as output:
        pytest = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = pytest.wait(seconds)
        except subprocess.TimeoutExpired:
            return "too slow"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
            _end_all(folder)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {0: "unnoticed", 1: "noticed"}.get(status) or f"pytest ended with {status}: {text[-300:]}"


def _end_all(folder):
    """Kill what the tests in this copy have left running, such as ranks that wait forever in sessions of their own."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def copied(folder):
    """Copy the checkout to a folder."""
    for name in COPIED:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "_build")
        shutil.copytree(source, folder / name, ignore=ignore) if source.is_dir() else shutil.copy(source, folder)
    return folder


def main():
    """Plant the faults of some rooms, and print which are noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--seconds", type=float, default=150, help="the time for the tests of one fault")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [(room, one) for room, some in rooms().items() if room in (options.rooms or [room]) for one in some]
    found, folders = Counter(), queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            folders.put(copied(Path(folder, str(job))))

        def play(room, mutant):
            own = folders.get()
            try:
                return room, mutant, noticed(mutant, own, options.seconds)
            finally:
                folders.put(own)

        for room, mutant, outcome in pool.map(lambda one: play(*one), chosen):
            found[room, outcome in ("noticed", "too slow")] += 1
            if outcome != "noticed":
                print(f"{room}: {outcome}: {mutant}", flush=True)
    few = False
    for room in dict.fromkeys(room for room, _ in chosen):
        well, count = found[room, True], found[room, True] + found[room, False]
        few = few or well < SHARE * count
        print(f"{room:15} {well} of {count} noticed")
    sys.exit(few)


if __name__ == "__main__":
    main()
