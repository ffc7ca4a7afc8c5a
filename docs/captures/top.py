"""Write top.svg: ``easydist top`` in a terminal, beside a job that hangs.

pip install -e '.[docs]' -c constraints.txt
python docs/captures/top.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from terminal import Terminal

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WAITED = re.compile(r" [5-9]\.\d s")  # at the end of the row
EASYDIST = (sys.executable, "-m", "easydist")


def main() -> None:
    """Take the picture when the waits have lasted long enough to be red."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # So that the picture shows no path of this machine.
    env |= {"PYTHON_EXEC": "python", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    job = subprocess.Popen([*EASYDIST, "run", "-n", "4", "stuck.py"], cwd=HERE, env=env)
    try:
        with Terminal(*EASYDIST, "top", str(job.pid), columns=104, rows=10, cwd=HERE, env=env) as top:
            top.wait_for(
                lambda: top.lines[-1:] and WAITED.search(top.lines[-1]), 120, "rank 3 to have waited for rank 2"
            )
            top.save_svg(HERE / "top.svg", "easydist top")
    finally:
        job.terminate()
        job.wait()


if __name__ == "__main__":
    main()
