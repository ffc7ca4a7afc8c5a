"""The output of several ranks as one text; no process is needed."""

import io
import sys

import pytest

from easydist.notebook.lines import Flood, Shown, Whole, height
from easydist.notebook.magics import chosen
from easydist.notebook.output import Notebook, Output


def test_a_line_that_a_rank_writes_again_is_another_line():
    shown, line = Shown([0, 1]), ("stdout", "step")
    shown.add([0], line)
    assert [shown.follow(1, line) for _ in range(2)] == [True, False]
    shown.add([1], line)
    assert [shown.follow(0, line) for _ in range(2)] == [True, False]


class Page:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.text, self.shown = "", []

    def write(self, stream, text):
        self.text += text

    def show(self, kind, content):
        self.shown.append((kind, content))

    @property
    def lines(self):
        return self.text.splitlines()


@pytest.fixture
def page():
    return Page()


def test_a_line_of_all_ranks_is_written_at_once(page):
    output = Output([0, 1], page)
    output.stream(0, "stdout", "one\n")
    assert page.lines == []
    output.stream(1, "stdout", "one\ntwo\n")
    assert page.lines == ["ranks 0–1: one"]


def test_lines_of_some_ranks_do_not_keep_later_ones_apart(page):
    output = Output([0, 1, 2], page)
    for rank in (2, 0, 1):
        output.stream(rank, "stdout", f"{'extra' * (rank == 1)}\nown {rank}\nboth\n")
    output.close()
    assert page.lines == [
        "ranks 0, 2: ",
        "rank 0: own 0",
        "rank 1: extra",
        "rank 1: own 1",
        "rank 2: own 2",
        "ranks 0–2: both",
    ]


def test_lines_in_crossed_order_all_come(page):
    output = Output([0, 1], page)
    output.stream(0, "stdout", "a\nb\n")
    output.stream(1, "stdout", "b\na\n")
    output.close()
    assert sorted(page.lines) in (
        ["rank 0: a", "rank 1: a", "ranks 0–1: b"],
        ["rank 0: b", "rank 1: b", "ranks 0–1: a"],
    )


def test_a_rank_that_lags_is_counted_where_it_repeats_lines_and_shown_where_it_does_not(page):
    output = Output([0, 1, 2], page)
    for rank in range(3):  # each comes after the lines of the one before have been written
        output.stream(rank, "stdout", f"own {rank}\na\n" + ("not zero\n" if rank else "") + "b\na\n")
        output.flush(float("inf"))
    output.close()
    assert page.lines == [
        *("rank 0: own 0", "rank 0: a", "rank 0: b", "rank 0: a"),
        *("rank 1: own 1", "rank 1: not zero", "rank 2: own 2"),
        "rank 1: 3 more lines, equal to lines above",
        "rank 2: 4 more lines, equal to lines above",
    ]


def test_lines_in_another_order_are_not_those_on_the_page(page):
    output = Output([0, 1], page)
    for rank, text in enumerate(["a\nb\n", "b\na\n"]):
        output.stream(rank, "stdout", text)
        output.flush(float("inf"))
    output.close()
    assert page.lines == ["rank 0: a", "rank 0: b", "rank 1: a", "rank 1: one more line, equal to one above"]


def test_a_flood_is_cut_and_its_file_keeps_everything(page, tmp_path):
    output = Output([0], page, tmp_path / "whole.txt")
    for start in range(0, 20_000, 1000):
        output.stream(0, "stdout", "".join(f"{i} \udcff\n" for i in range(start, start + 1000)))
    output.close()
    place = f"all lines are in {tmp_path / 'whole.txt'}"
    assert page.lines[-22] == f"… too many lines to show, {place}; the last ones follow …"
    left_out = 20_000 - (len(page.lines) - 2)
    assert page.lines[-21] == f"… {left_out:,} lines are not shown here, {place} …"
    assert page.lines[-1] == "rank 0: 19999 \udcff"
    assert len((tmp_path / "whole.txt").read_text().splitlines()) == 20_000


@pytest.mark.slow
def test_a_flood_may_begin_within_one_piece_of_text(page, tmp_path):
    """As that of a program in C. Its lines are not kept one by one until other ranks may have written the same."""
    output = Output([0, 1], page, tmp_path / "all")
    output.stream(0, "stdout", "\n".join(map(str, range(50_000))) + "\n")
    assert "too many lines" in page.text
    assert 10_000 <= page.text.count("\n") < 25_000
    output.close()
    assert page.text.endswith("rank 0: 49999\n")
    assert (tmp_path / "all").read_text().count("\n") == 50_000


def test_a_flood_goes_on_if_its_file_cannot_be_written(page, tmp_path):
    output = Output([0], page, tmp_path / "no folder" / "whole.txt")
    for start in range(0, 20_000, 1000):
        output.stream(0, "stdout", "".join(f"{i}\n" for i in range(start, start + 1000)))
    output.close()
    assert "lines are not shown here, not kept" in page.lines[-21]
    assert page.lines[-1] == "rank 0: 19999"


def test_equal_lines_of_two_streams_stay_apart(page):
    output = Output([0, 1], page)
    output.stream(0, "stdout", "text\n")
    output.stream(1, "stderr", "text\n")
    output.close()
    assert page.lines == ["rank 0: text", "rank 1: text"]


def test_lines_come_in_pieces_and_the_last_one_needs_no_end(page):
    output = Output([0], page)
    for piece in ("be", "gin\nen", "d"):
        output.stream(0, "stdout", piece)
    assert page.lines == ["rank 0: begin"]
    output.close()
    assert page.lines == ["rank 0: begin", "rank 0: end"]


def test_a_progress_bar_of_the_first_rank_shows(page):
    output = Output([0, 1], page)
    for state in ("\r0%", "\r50%", "\r100%", "\n"):
        for rank in (0, 1):
            output.stream(rank, "stderr", state)
    output.stream(0, "stdout", "done\n")
    output.stream(1, "stdout", "done\n")
    output.close()
    assert page.text == "\rrank 0: 0%\rrank 0: 50%\rrank 0: 100%\nranks 0–1: done\n"


def test_lines_of_a_terminal_end_with_two_characters_and_are_no_progress_bars(page):
    output = Output([0, 1], page)
    for rank in (0, 1):
        output.stream(rank, "stdout", f"I am {rank}\r\nboth\r")
        output.stream(rank, "stdout", "\n\r0%\r100%\r\n")
    output.close()
    assert "rank 0: I am 0\nrank 1: I am 1\n" in page.text
    assert "ranks 0–1: both\n" in page.text
    assert "\rrank 0: 100%\n" in page.text


def test_values_are_folded_and_rich_ones_shown(page):
    output = Output([0, 1, 2], page)
    rich = {"text/plain": "table", "text/html": "<table>"}
    for rank, data in enumerate([rich, {"text/plain": "1\n2"}, rich]):
        output.result(rank, {"data": data})
    output.close()
    assert page.lines == ["ranks 0, 2:", "rank 1: 1", "rank 1: 2"]
    assert page.shown == [("display_data", {"data": rich})]


def test_rich_values_that_differ_are_all_shown_though_their_text_is_the_same(page):
    output = Output([0, 1, 2], page)
    values = [{"text/plain": "<Figure with 1 Axes>", "image/png": image} for image in ("a", "b", "a")]
    for rank, data in enumerate(values):
        output.result(rank, {"data": data})
    output.close()
    assert page.lines == ["ranks 0, 2:", "rank 1:"]
    assert page.shown == [("display_data", {"data": data}) for data in values[:2]]


def figure(name):
    return {"data": {"text/plain": name}}


def test_figures_of_the_first_rank_show_after_what_it_has_written(page):
    output = Output([1, 2], page)
    output.stream(1, "stdout", "drawing\n")
    output.display(1, "display_data", figure("a"))
    assert page.lines == ["rank 1: drawing"]
    assert page.shown == [("display_data", figure("a"))]
    output.display(2, "display_data", figure("b"))
    output.close()
    assert page.lines == ["rank 1: drawing"]


def test_a_figure_of_another_rank_alone_is_not_lost(page):
    output = Output([0, 1, 2], page)
    output.display(1, "display_data", figure("a"))
    output.display(2, "display_data", figure("b"))
    output.close()
    assert page.lines == ["rank 1:", "rank 2: figures and other rich output, shown by %%ranks 2"]
    assert page.shown == [("display_data", figure("a"))]


def test_ranks_that_have_shown_more_figures_than_the_first_are_named(page):
    output = Output([0, 1, 2, 3], page)
    for rank, names in enumerate(["a", "a", "ab", ""]):
        for name in names:
            output.display(rank, "display_data", figure(name))
    output.close()
    assert page.shown == [("display_data", figure("a"))]
    assert page.lines == ["ranks 1–2: figures and other rich output, shown by %%ranks 1"]


def test_ranks_may_be_named_in_any_way():
    assert [chosen(line, 4) for line in (" ", "2", "3,0", "0 2", "1-2, 0", "2-2", "0-3")] == [
        None,
        *([2], [0, 3], [0, 2], [0, 1, 2], [2], [0, 1, 2, 3]),
    ]


def test_what_a_programs_output_cannot_encode_is_replaced(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
        Notebook().write("stdout", "ranks 0–1: café\n")
        assert written.getvalue() == b"ranks 0?1: caf?\n"


def test_a_flood_ends_once_lines_have_come_slowly():
    flood = Flood()
    assert not flood.fall(1000.0)
    assert not flood.rise(10_000)
    assert flood.rise(1)
    assert not flood.rise(5000)  # it is on already
    assert [flood.fall(1000.0 + seconds) for seconds in (0.0, 1.0, 1.5, 2.0)] == [False, False, False, True]


def test_a_long_line_takes_several_and_a_short_one_one():
    assert [height(text) for text in ("", "a", "a\nb\nc", "x" * 199, "x" * 200, "x" * 200 + "\n")] == [1, 1, 3, 1, 2, 2]


@pytest.mark.parametrize("line", ["4", "a", "0,,9", "-1", "1-", "3-9", "2 x", "3-1", "0 3-1", ","])
def test_a_line_that_names_no_ranks_is_refused(line):
    with pytest.raises(Exception, match="give ranks between 0 and 3"):
        chosen(line, 4)


def test_a_cells_file_keeps_no_more_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("easydist.notebook.lines._LARGEST", 200_000)
    whole = Whole(tmp_path / "output.txt")
    for number in range(40_000):
        whole.add(0, f"{number:8}")
    assert whole.place() == f"their first GiB is in {tmp_path / 'output.txt'}"
    whole.close()
    lines = (tmp_path / "output.txt").read_text().splitlines()
    assert lines == [f"rank 0: {number:8}" for number in range(len(lines))]
    assert len(lines) == -(-200_000 // len("rank 0: 12345678\n"))
