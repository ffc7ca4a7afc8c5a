"""Cells that print much, or without end, on the ranks of a real notebook kernel."""

import re
from pathlib import Path

import pytest
from notebook_kernels import kernel, until

pytestmark = pytest.mark.slow

COUNT = 100_000


@pytest.fixture(scope="module")
def nb():
    with kernel() as made:
        made.good("import easydist\ncluster = easydist.notebook.start(2)", 60)
        yield made


def messages_of(nb, code, seconds=30):
    """Run a cell, and return what it showed and the number of its output messages."""
    pieces = []
    shown = nb.run(code, seconds, hook=lambda shown: pieces.append(len(shown.out)))
    assert not shown.errors, shown.error
    return shown, len(set(pieces) - {0})


def test_many_lines_come_in_few_messages(nb):
    shown, count = messages_of(nb, "%%ranks\nfor i in range(5000): print(i)")
    told = [line for line in shown.lines if "above" not in line]
    assert [line.partition(": ")[2] for line in told] == [str(i) for i in range(5000)]
    assert count < 1000


def test_equal_lines_of_ranks_that_have_drifted_apart_show_once(nb):
    """Rank 1 begins only after all lines of rank 0 are on the page."""
    nb.good("import tempfile\nstarts = tempfile.mktemp()\n%push starts")
    path = Path(nb.good("starts").results[0]["text/plain"].strip("'"))
    code = "%%ranks\nimport os, time\nwhile rank and not os.path.exists(starts): time.sleep(0.01)\n"
    code += "for i in range(500): print('step', i)\nprint('end', rank)"
    shown = nb.run(code, hook=lambda shown: "end 0" in shown.out and path.touch())
    path.unlink()
    assert shown.lines == [
        *(f"rank 0: step {i}" for i in range(500)),
        "rank 0: end 0",
        "rank 1: end 1",
        "rank 1: 500 more lines, equal to lines above",
    ]


def test_a_flood_is_shown_head_and_tail_and_a_file_has_the_whole(nb):
    shown, count = messages_of(nb, f"%%ranks\nfor i in range({COUNT}): print('line', rank, i)", 60)
    own = [[line for line in shown.lines if line.startswith(f"rank {rank}: line")] for rank in range(2)]
    for rank in range(2):
        assert own[rank][0] == f"rank {rank}: line {rank} 0"
        assert own[rank][-1] == f"rank {rank}: line {rank} {COUNT - 1}"
    text = next(line for line in shown.lines if "are not shown here" in line)
    left_out = int(re.search(r"… ([\d,]+) lines", text)[1].replace(",", ""))
    assert left_out + len(own[0]) + len(own[1]) == 2 * COUNT
    assert count < 1000
    whole = Path(re.search(r"all lines are in (\S+)", text)[1]).read_text().splitlines()
    for rank in range(2):
        assert [line for line in whole if line.startswith(f"rank {rank}:")] == [
            f"rank {rank}: line {rank} {i}" for i in range(COUNT)
        ]


ENDLESS = {
    "equal": "%%ranks\nprint('ready')\nimport itertools\nfor i in itertools.count(): print(i)",
    "own": "%%ranks\nprint('ready')\nimport itertools\nfor i in itertools.count(): print(rank, i)",
    "no line break": "%%ranks\nprint('ready')\nwhile True: print(100 * 'x', end=' ')",
    "program": "%%ranks\nprint('ready')\nimport os\nos.system('yes')",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_the_stop_button_ends_a_cell_that_prints_without_end(nb, what):
    asked = []

    def interrupt(shown):
        if "too many lines" in shown.out and not asked:
            asked.append(True)
            nb.manager.interrupt_kernel()

    text = nb.bad(ENDLESS[what], 60, hook=interrupt)
    assert text == "Interrupted on all ranks; their variables are kept."
    assert nb.good("%%ranks\n'works'").lines == ["ranks 0–1: 'works'"]


def test_a_rank_that_asks_is_told_what_to_do(nb):
    for code in ("input('name? ')", "import getpass; getpass.getpass()", "breakpoint()"):
        text = nb.bad(f"%%ranks\n{code}")
        assert "ranks cannot ask; ask in a cell of the notebook itself" in text
        assert "%push answer" in text
        assert "raw_input" not in text


def test_a_value_that_cannot_be_sent_is_named_in_one_line(nb):
    for code in ("cluster.push(lazy=(i for i in []))", "lazy = (i for i in [])\n%push lazy"):
        text = nb.bad(code)
        assert text.startswith("lazy cannot be sent to the ranks: it cannot be pickled (cannot pickle 'generator'")
        assert len(text.splitlines()) == 1


def test_the_last_lines_of_a_flood_show_when_it_is_over(nb):
    """The cell still runs then."""
    seen = []

    def interrupt(shown):
        if "are not shown here" in shown.out and not seen:
            seen.append(shown.lines[-1])
            until(lambda: nb.is_in("gather", 0))
            nb.manager.interrupt_kernel()

    code = "%%ranks\nimport time\nfor i in range(30_000): print(i)\nif rank: time.sleep(600)\neasydist.gather(1)"
    assert nb.bad(code, 60, hook=interrupt) == "Interrupted on all ranks; their variables are kept."
    assert seen[0].endswith(": 29999")
