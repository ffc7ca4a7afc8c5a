"""Write first_hour/*.txt and top_beside.svg: what a new user sees, in a fresh clone of this repository.

pip install -e '.[docs]' -c constraints.txt
python docs/captures/first_hour.py

It takes some minutes: `make demo` makes an environment of its own. Only what is committed is in the clone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SHOWN = HERE / "first_hour"
HOME = "/home/ann"
COLUMNS = 128
SIZE = {"columns": COLUMNS, "rows": 40}
STEPS = {
    "clone": f"git clone --quiet {ROOT} easydist && cd easydist",
    "demo": "make demo",
    "run": "easydist run -n 2 examples/evaluate.py",
    "check": "easydist check",
    "notebook": "jupyter execute --output=done examples/notebook.ipynb",
}
WAITED = re.compile(r" main_process_first +examples/evaluate\.py:\d+ +0 +(0\.[5-9]|[1-9])")


class Newcomer:
    """Somebody with an empty home and nothing activated, who types commands."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._env = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
        self._env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._env["PIP_QUIET"] = "1"  # nothing about this machine's package indexes
        binary = home / "easydist" / ".venv" / "bin"
        self._env["PATH"] = os.pathsep.join([str(binary), self._env["PATH"]])

    def terminal(self, command: str, **size: int) -> Terminal:
        folder = self._home / "easydist"
        return Terminal("bash", "-c", command, cwd=folder if folder.exists() else self._home, env=self._env, **size)

    def types(self, command: str) -> str:
        """The text in the terminal at the end."""
        print("$", command, flush=True)
        with self.terminal(command, **SIZE) as terminal:
            status = terminal.finish(1800)
            lines = terminal.lines
        assert status == 0, "\n".join(lines)
        return "\n".join(lines).replace(str(self._home), HOME)

    def at_home(self, svg: str) -> str:
        """Return a picture with another home; the lines keep their lengths."""
        spaces = "&#160;" * (len(str(self._home)) - len(HOME))
        return re.sub(rf"{re.escape(str(self._home))}([^<]*)", rf"{HOME}\1{spaces}", svg)


def main() -> None:
    """Type what a new user types."""
    SHOWN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ann = Newcomer(Path(folder))
        for name, command in STEPS.items():
            text = ann.types(command)
            typed = command.replace(str(ROOT), "…")
            (SHOWN / f"{name}.txt").write_text(f"$ {typed}\n{text}".rstrip() + "\n", encoding="utf-8")
        done = json.loads((Path(folder) / "easydist" / "examples" / "done.ipynb").read_text(encoding="utf-8"))
        (SHOWN / "notebook_cells.txt").write_text("\n\n".join(cells_of(done)) + "\n", encoding="utf-8")
        look_beside(ann)


def cells_of(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells that hold code, and their outputs, as a terminal would show them."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield f"In [{cell['execution_count']}]:\n" + "".join(cell["source"])
            if said := "".join(map(said_in, cell["outputs"])).rstrip():
                yield said


def said_in(output: dict[str, Any]) -> str:
    """The text of one output of a cell, without colours."""
    data = output.get("data", {})
    text = output.get("text") or output.get("traceback") or data.get("text/plain", "")
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(text) if "traceback" in output else "".join(text)) + "\n" * bool(data)


def look_beside(ann: Newcomer) -> None:
    """In a second terminal, look at a job while rank 1 waits for the rank that trains; again if that was too short."""
    while True:
        with (
            ann.terminal(STEPS["run"], **SIZE) as job,
            ann.terminal(f"easydist top {job.pid} --interval 0.1", columns=112, rows=8) as top,
        ):
            top.wait_for(lambda: is_waiting(top) or job.is_over(), 300, "rank 1 to have waited for rank 0")
            if is_waiting(top):
                top.save_svg(picture := HERE / "top_beside.svg", "easydist top")
                picture.write_text(ann.at_home(picture.read_text(encoding="utf-8")), encoding="utf-8")
                assert job.finish(120) == 0
                return


def is_waiting(top: Terminal) -> bool:
    return any(map(WAITED.search, top.lines))


if __name__ == "__main__":
    main()
