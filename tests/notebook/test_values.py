"""Values between the notebook and its ranks; no process is needed."""

import linecache

import pytest
import torch

from easydist import UnsafeObjectError
from easydist.notebook.values import is_plain, pack, pack_call, sources, unpack


class Own:
    """A class that only a pickle can carry."""

    def __eq__(self, other):
        return type(other) is Own


@pytest.mark.parametrize("weights_only", [True, False])
def test_plain_values_arrive_whoever_is_trusted(weights_only):
    value = {"a": [1, None, "text"], "b": (2.5, b"bytes")}
    assert is_plain(value)
    assert unpack(pack(value, "value"), weights_only=weights_only) == value
    got = unpack(memoryview(pack(torch.arange(6.0).view(2, 3).t(), "t")), weights_only=weights_only)
    assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_other_values_arrive_only_from_those_who_are_trusted():
    message = pack([Own(), torch.ones(1)], "value")
    assert not is_plain([Own()])
    with pytest.raises(UnsafeObjectError, match="pass weights_only=False if you trust the ranks"):
        unpack(message, weights_only=True)
    assert unpack(message, weights_only=False)[0] == Own()


def test_a_call_travels_as_a_pickle():
    message = pack_call(len, ([1, 2],), {})
    with pytest.raises(UnsafeObjectError):
        unpack(message, weights_only=True)
    assert unpack(message, weights_only=False) == (len, ([1, 2],), {})


def test_a_part_that_cannot_be_sent_is_named():
    steps = (step for step in [])
    with pytest.raises(TypeError, match=r"^steps cannot be sent to the ranks: it cannot be pickled"):
        pack(steps, "steps")
    with pytest.raises(
        TypeError, match=r"^len cannot be sent to the ranks: argument 1, a generator, cannot be pickled"
    ):
        pack_call(len, (1, steps), {"key": 2})


def test_a_function_of_a_cell_brings_its_source_and_no_other_one_does(monkeypatch):
    lines, names = ["def f():\n", "    return 1\n"], {}
    monkeypatch.setitem(linecache.cache, "<cell 3>", (1, None, lines, "<cell 3>"))
    exec(compile("".join(lines), "<cell 3>", "exec"), names)
    assert sources(names["f"]) == {"<cell 3>": "".join(lines)}
    assert sources(pack) == sources(len) == {}
