"""Tests of the search in the documentation that `make docs` has built, in a browser without a window."""

import functools
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import launching
import pytest
from launching import ROOT

BUILT = ROOT / "build" / "docs"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
)
WAIT = "--virtual-time-budget=20000"
"""Milliseconds of the page's own clock, which passes as fast as the page works."""

FIRST = {"gather": "api.html#easydist.gather", "broadcast": "api.html#easydist.broadcast", "hang": "symptoms.html"}
AMONG_THREE = {
    "metric": "metrics.html",
    "jupyter": "notebook.html",
    "colab": "questions.html",
    "deadlock": "symptoms.html",
    "slurm": "launching.html",
    "nccl": "gpus.html",
    "checkpoint": "tutorial_training.html",
    "kubernetes": "questions.html",
    "horovod": "coming_from_mpi4py.html",
}


def why_not():
    """Return why there is nothing to search; empty if there is."""
    index = BUILT / "searchindex.js"
    if not BROWSER:
        return "needs chromium: apt-get install chromium"
    if not index.exists():
        return "make docs has not built the pages"
    if any(page.stat().st_mtime > index.stat().st_mtime for page in (ROOT / "docs").rglob("*.md")):
        return "the pages are newer than what make docs has built"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be searched")]


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that writes no log."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=BUILT)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def found(address, word, folder):
    """Return the links of the results, best first."""
    page = f"{address}/search.html?q={word}"
    browser = launching.start(BROWSER, *QUIET.split(), WAIT, f"--user-data-dir={folder}", "--dump-dom", page)
    ((out, _),) = launching.finished(browser)
    return re.findall(r'<li class="kind-\w+"><a href="([^"]*)"', out)


@pytest.mark.parametrize("word", FIRST)
def test_a_name_comes_first(word, address, tmp_path):
    assert found(address, word, tmp_path)[0] == FIRST[word]


@pytest.mark.parametrize("word", AMONG_THREE)
def test_a_word_finds_its_page(word, address, tmp_path):
    assert AMONG_THREE[word] in [link.partition("#")[0] for link in found(address, word, tmp_path)[:3]]
