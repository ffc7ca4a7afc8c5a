"""Write notebook.png: a notebook with four ranks, run in JupyterLab, as a browser shows it.

pip install -e '.[notebook]' -c constraints.txt jupyterlab==4.6.6 playwright==1.65.2
apt-get install chromium fonts-noto-core fonts-dejavu-core  # or: playwright install chromium
python docs/captures/notebook.py
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WIDTH, HEIGHT, MARGIN = 1000, 2000, 12
CELLS = [
    "import easydist.notebook\n\ncluster = easydist.notebook.start(4)",
    """%%ranks
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: mean loss {easydist.reduce(loss.detach(), 'mean'):.3f}")
f"{rank} of {world_size}\"""",
    """%%ranks
if rank == 2:
    raise ValueError("a bad batch")
total = easydist.reduce(loss.detach(), "sum")""",
    """%%ranks
import os, signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
easydist.wait_for_everyone()""",
    "cluster.status()",
]
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
}
IS_DONE = """() => {
    const notebook = window.jupyterapp.shell.currentWidget;
    return notebook.content.widgets.filter(cell => cell.model.type === 'code')
        .every(cell => cell.model.executionCount !== null && cell.model.executionState === 'idle');
}"""


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves a folder, without settings of the user's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    token = secrets.token_hex()
    settings = folder / "settings"
    settings.mkdir()
    (settings / "overrides.json").write_text(json.dumps(SETTINGS))
    options = ["--no-browser", "--expose-app-in-browser", f"--port={port}", f"--IdentityProvider.token={token}"]
    options += [f"--LabApp.app_settings_dir={settings}", f"--ServerApp.root_dir={folder}"]
    options += ["--allow-root"] if os.getuid() == 0 else []
    own = {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    env = {**os.environ, **own, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
    lab = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=env, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_up(f"{address}/api?token={token}"):
            if lab.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("JupyterLab does not start")
            time.sleep(0.1)
        yield f"{address}/doc/tree/demo.ipynb?token={token}"
    finally:
        lab.send_signal(signal.SIGTERM)
        lab.wait()


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address):
            return True
    except OSError:
        return False


def picture(page: Page, address: str, path: Path) -> None:
    """Run all cells, and photograph the page down to the last one."""
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
    )
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(IS_DONE, timeout=120_000)
    page.evaluate("() => document.activeElement.blur()")
    last = page.locator(".jp-Notebook .jp-Cell").last.bounding_box()
    panel = page.locator(".jp-NotebookPanel").bounding_box()
    page.screenshot(path=path, clip={**panel, "height": last["y"] + last["height"] + MARGIN - panel["y"]})


def main() -> None:
    """Run the cells in a folder of their own."""
    cells = [new_code_cell(source) for source in CELLS]
    for cell in cells:
        cell.metadata["tags"] = ["raises-exception"]  # the cells after it run, too
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), Path(name) / "demo.ipynb")
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        with jupyterlab(Path(name)) as address:
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5)
            picture(page, address, HERE / "notebook.png")
        browser.close()


if __name__ == "__main__":
    main()
