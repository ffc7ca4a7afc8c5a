"""Tests of the display of easydist's values in notebooks, in IPython's own shell if it does the displaying."""

import re
import sys
import traceback
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
import torch
from launching import ROOT, forked

import easydist
from easydist import tree
from easydist.base import html


class Balanced(HTMLParser):
    """A parser that collects the text, and fails if elements are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.said = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def said(markup):
    """Return the texts of HTML, after checking that it is well-formed and sets no colour: pages are light or dark."""
    parser = Balanced()
    parser.feed(markup)
    parser.close()
    assert not parser.open
    assert "color" not in markup
    return parser.said


EVIL = "<script>alert('&')</script>"


def test_all_that_is_shown_is_escaped():
    texts = [html.table([EVIL], [[EVIL]]), html.text(EVIL, EVIL), easydist.RemoteError(EVIL)._repr_html_()]
    texts.append(tree.flatten({EVIL: EVIL, "a": 1})[1]._repr_html_())
    texts.append(easydist.header({EVIL: torch.ones(1)}, {EVIL: EVIL})._repr_html_())
    for markup in texts:
        assert EVIL not in markup
        assert "alert(" in "".join(said(markup))


def test_rows_that_are_marked_stand_out():
    plain, marked = html.table(["rank"], [["0"], ["1"]]), html.table(["rank"], [["0"], ["1"]], marked=[1])
    assert said(plain) == ["rank", "0", "1"]
    assert "color" not in marked.partition(">0<")[0]
    assert "color: var(--jp-error-color1" in marked.partition(">0<")[2]


def test_a_trace_is_its_table():
    with easydist.trace() as trace:
        easydist.reduce(torch.ones(3), "sum")
        easydist.gather_object("a")
    assert str(trace) == trace.summary()
    cells = said(trace._repr_html_())
    assert cells[0] == str(trace).partition("\n")[0]
    words = re.split(r"\s{2,}|\n", str(trace))
    assert cells[1:] == words[1:]


def test_an_empty_trace_has_no_table():
    assert said(easydist.trace()._repr_html_()) == ["0 calls of this rank"]


def test_a_structure_is_a_table_of_its_paths():
    _, spec = tree.flatten({"x": torch.ones(2), "rows": [1, ("text", 2.5)], "long": "y" * 500})
    rows = said(spec._repr_html_())
    assert rows[:3] == ["leaf", "path", "plain value"]
    assert rows[3:9] == ["0", "['x']", "1", "['rows'][0]", "2", "['rows'][1][1]"]
    assert rows[9:11] == ["['rows'][1][0]", "'text'"]
    assert rows[11] == "['long']"
    assert len(rows[12]) == 80
    assert said(tree.flatten(list(range(200)))[1]._repr_html_())[-1] == "… and 100 more"


def test_a_header_is_a_table_of_its_tensors_and_its_metadata():
    header = easydist.header({"b.weight": torch.ones(2, 3), "odd\nname": torch.tensor(7)}, {"step": "3"})
    lines = repr(header).splitlines()
    assert lines[:3] == [
        "name         dtype    shape   start  stop",
        "'odd\\nname'  int64    ()          0     8",
        "b.weight     float32  (2, 3)      8    32",
    ]
    assert lines[3:5] == ["format: pt", "step: 3"]
    cells = said(header._repr_html_())
    assert cells[:5] == ["name", "dtype", "shape", "start", "stop"]
    assert cells[10:15] == ["b.weight", "float32", "(2, 3)", "8", "32"]
    assert cells[15].splitlines() == lines[3:]
    many = easydist.header({str(i): torch.ones(1) for i in range(102)})
    assert said(many._repr_html_())[-1].startswith("… and 2 more\nformat: pt\n")


def test_an_error_is_its_class_and_text():
    error = easydist.DisagreementError("gather: ranks disagree on 1 of 2 leaves\n  ['logits']  rank 0: float32 (8, 10)")
    assert "".join(said(error._repr_html_())) == f"DisagreementError: {error}"


CELLS = r"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.colors = "nocolor"
shell.run_cell("import easydist, torch")
for mode in ("Context", "Verbose", "Minimal"):
    print("=====", mode)
    shell.run_line_magic("xmode", mode)
    shell.run_cell("easydist.gather_object(easydist.trace, weights_only=True)")
    print("----- another's")
    shell.run_cell("with easydist.together():\n    raise easydist.WireError('no <message>')")
print("===== html")
for value in ("easydist.PeerLostError('rank 1 is lost')", "easydist.trace()"):
    shell.run_cell(f"value = {value}")
    print(sorted(shell.display_formatter.format(shell.user_ns["value"])[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("IPython"), reason="needs IPython")
def test_ipython_ends_a_traceback_at_the_call_of_easydist(tmp_path):
    path = tmp_path / "cells.py"
    path.write_text(CELLS)
    out, _ = forked(path, IPYTHONDIR=tmp_path)
    context, verbose, minimal, shown = [part.partition("\n")[2] for part in out.split("===== ")[1:]]
    own, _, another = context.partition("----- another's\n")
    assert "----> 1 easydist.gather_object(easydist.trace, weights_only=True)\n\nUnsafeObjectError: the message" in own
    assert "----> 2     raise easydist.WireError('no <message>')\n" in another
    assert str(ROOT / "easydist") not in context
    assert str(ROOT / "easydist" / "format") in verbose
    assert "UnsafeObjectError: the message" in minimal
    assert shown.splitlines() == ["['text/html', 'text/plain']"] * 2


def test_without_ipython_the_lines_are_pythons_own(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with pytest.raises(easydist.UnsafeObjectError) as caught:
        easydist.gather_object(easydist.trace, weights_only=True)
    assert caught.value._render_traceback_() == traceback.format_exception(caught.value)
