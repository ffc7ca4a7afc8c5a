"""The lines of ranks on their way to the terminal: whole, each after its rank, none lost."""

import contextlib
import io
import os
import select
import sys
import threading

import pytest
from test_env import easydist

from easydist.cli.lines import _Screen, _screen_of, tail


def shown(*pieces):
    """Return what a terminal shows of the pieces that ranks write one after another, each long after the last one."""
    stream = io.StringIO()
    screen = _Screen(stream)
    for header, text in pieces:
        screen.show(header, header, [text])
    return stream.getvalue()


def test_a_line_without_an_end_goes_on_unless_another_rank_has_written():
    assert shown(("0 ", "a"), ("0 ", "b"), ("0 ", "\n"), ("1 ", "c\n")) == "0 ab\n1 c\n"
    assert shown(("0 ", "a"), ("1 ", "c\n"), ("0 ", "\n"), ("0 ", "b\n")) == "0 a\n1 c\n0 b\n"
    assert shown(("0 ", "a"), ("1 ", "c"), ("0 ", "b\n"), ("1 ", "\n"), ("1 ", "\n")) == "0 a\n1 c\n0 b\n1 \n"


def test_stderr_does_not_continue_lines_of_stdout_on_the_same_terminal(tmp_path, monkeypatch):
    path = tmp_path / "terminal"
    with open(path, "w") as out, os.fdopen(os.dup(out.fileno()), "w") as err, open(os.devnull, "w") as other:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        _screen_of(out).show("0/stdout.log", "0 ", ["begins"])
        _screen_of(err).show("0/stderr.log", "0 ", ["warns\n"])
        _screen_of(out).show("0/stdout.log", "0 ", ["ends\n"])
        monkeypatch.setattr(sys, "stderr", other)
        assert _screen_of(other) is not _screen_of(out)
    assert path.read_text() == "0 begins\n0 warns\n0 ends\n"


def test_output_that_cannot_be_written_is_an_error_once(capsys):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # its buffer stays full
        screen = _Screen(full)
        for number in range(3):
            screen.show("file", "0 ", [f"{number}\n"])
    said = "easydist run: cannot show the ranks' output any more: No space left on device\n"
    assert capsys.readouterr().err == said


def tailed(*pieces):
    """Return what is shown of pieces that a rank writes, each read on its own."""
    read, write = os.pipe()
    stream, finished = io.StringIO(), threading.Event()
    reader = threading.Thread(target=tail, args=("0 ", f"/dev/fd/{read}", stream, finished, 0.01))
    reader.start()
    for piece in pieces:
        os.write(write, piece)
        while select.select([read], [], [], 0)[0]:
            pass
    finished.set()
    os.close(write)
    reader.join()
    os.close(read)
    return stream.getvalue()


def test_a_line_that_is_half_written_is_shown_whole():
    assert tailed(b"first\nhalf", b" a line\rbar\rend") == "0 first\n0 half a line\n0 bar\n0 end"


def test_a_character_or_an_end_of_line_that_is_half_written_is_shown_whole():
    assert tailed(b"caf\xc3", b"\xa9\r", b"\nend\xc3") == "0 caf\xe9\n0 end\ufffd"


def test_ranks_without_a_prefix_do_not_continue_each_others_lines():
    screen = _Screen(stream := io.StringIO())
    for source, lines in (("a", ["begins"]), ("b", ["one\n", "two\n"]), ("a", ["\n", "three\n"]), ("b", ["\n"])):
        screen.show(source, "", lines)
    assert stream.getvalue() == "begins\none\ntwo\nthree\n\n"


@pytest.mark.slow
def test_lines_of_several_writes_are_not_torn(tmp_path):
    text = """
import os, time
for step in range(300):
    os.write(1, b"step")
    time.sleep(0.001)
    os.write(1, f" {step}\\n".encode())
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    out, _ = easydist("run", "-n", "2", script)
    assert sorted(out.splitlines()) == sorted(f"[rank {rank}] step {step}" for rank in range(2) for step in range(300))
