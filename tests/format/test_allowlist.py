"""The classes that restricted decoding allows, and the ways to allow more."""

import os
import random

import launching
import numpy as np
import pytest
import torch
import trees
from pickles import message, named, refused, round_trip
from trees import CASES, Batch, Color, Items, Point, assert_same

import easydist
from easydist import UnsafeObjectError
from easydist.format import codec
from easydist.testing import distributed


def test_the_error_names_the_global_and_says_how_to_allow_it():
    with pytest.raises(UnsafeObjectError) as caught:
        round_trip({"c": Color.RED}, weights_only=True)
    assert str(caught.value) == (
        "the message asks for trees.Color, which is not allow-listed. If you trust its sender, allow the class with "
        "easydist.allow_globals([...]) on every rank, or decode with weights_only=False"
    )


@pytest.mark.parametrize(
    "name", ["namedtuple", "dataclass", "frozen dataclass with slots", "list subclass", "dict subclass", "enum", "deep"]
)
def test_registered_classes_are_decoded(name):
    allowed = [Point, Batch, trees.FrozenSlotted, Items, trees.Registry, Color]
    with torch.serialization.safe_globals(allowed):
        assert_same(round_trip(CASES[name](), weights_only=True), CASES[name]())
    with torch.serialization.safe_globals([(Point, "trees.Point"), Batch]):
        assert_same(round_trip(CASES["deep"](), weights_only=True), CASES["deep"]())


@pytest.fixture
def allowed(monkeypatch):
    """Limit each test's allowed classes to that test."""
    monkeypatch.setattr(easydist.format.allowlist, "_allowed", {})


@pytest.mark.usefixtures("allowed")
def test_allowed_classes_and_functions_are_decoded():
    easydist.allow_globals([Point, Color, (os.getpid, "somewhere.pid")])
    data = [Point(torch.ones(2), 1), Color.RED]
    assert_same(round_trip(data, weights_only=True), data)
    call = b"\x80\x05" + named("somewhere", "pid") + b")R."
    assert codec.decode(message(call), weights_only=True) == os.getpid()
    easydist.allow_globals(iter([torch.Generator]))
    assert "torch._C.Generator" in easydist.format.allowlist.registered()


SCRIPT = """
import enum, multiprocessing
import easydist
from easydist.format import codec

class Status(enum.Enum):
    DONE = 1

easydist.allow_globals([Status])

def answer(link):
    status = codec.decode(codec.encode(link.recv(), weights_only=True), weights_only=True)  # as this process names it
    message = memoryview(bytearray(link.recv_bytes()))
    assert codec.decode(message, weights_only=True) is status is Status.DONE
    link.send_bytes(bytes(codec.encode(status, weights_only=True).numpy()))

if __name__ == "__main__":
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs,))
    child.start()
    mine.send(Status.DONE)
    mine.send_bytes(bytes(codec.encode(Status.DONE, weights_only=True).numpy()))
    theirs.close()
    print(codec.decode(memoryview(bytearray(mine.recv_bytes())), weights_only=True))
    child.join()
"""


@pytest.mark.slow
def test_a_class_of_the_script_is_allowed_under_the_name_that_a_spawned_process_gives_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert launching.python(script)[0] == "Status.DONE\n"


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("wrong", [3, "trees.Color", (Color, 3), (Color, "a", "b")])
def test_what_is_no_class_or_function_cannot_be_allowed(wrong):
    with pytest.raises(TypeError, match=r"allow_globals: .* is neither a class or function nor a pair of one and its"):
        easydist.allow_globals([Color, wrong])
    with pytest.raises(UnsafeObjectError):
        round_trip(Color.RED, weights_only=True)


@pytest.mark.slow
def test_what_torch_registers_with_itself_is_not_allowed_by_it():
    import torch.distributed.tensor  # registers DeviceMesh, which connects to other processes when it is made

    entries = torch.serialization.get_safe_globals()
    assert torch.distributed.device_mesh.DeviceMesh in entries
    for entry in entries:
        if isinstance(entry, type) and entry.__module__.startswith("torch.distributed"):
            asked = b"\x80\x05" + named(entry.__module__, entry.__qualname__)
            assert "easydist.allow_globals([...])" in refused(asked + b".")
            assert "not allow-listed" in refused(asked + b")R.")
    with torch.serialization.safe_globals([torch.Generator, (torch.Generator, "trees.Generator")]):
        assert "trees.Generator" in refused(b"\x80\x05" + named("trees", "Generator") + b")R.")


@pytest.fixture
def denied():
    easydist.allow_pickle(False)
    yield
    easydist.allow_pickle(True)


@pytest.mark.usefixtures("denied")
def test_the_switch_denies_pickle_everywhere():
    message = codec.encode(Color.RED)
    with pytest.raises(UnsafeObjectError, match=r"trees\.Color"):
        codec.decode(message)
    with pytest.raises(UnsafeObjectError, match=r"pickle is denied in this process .* pass weights_only=True"):
        codec.decode(message, weights_only=False)
    for call in (
        lambda: easydist.gather_object(1),
        lambda: easydist.broadcast_object_list([1]),
        lambda: easydist.scatter_object_list([None], [1]),
    ):
        with pytest.raises(UnsafeObjectError, match="pickle is denied"):
            call()
    assert easydist.gather_object({"a": 1}, weights_only=True) == [{"a": 1}]


@distributed(world_size=2)
def test_random_states_travel_where_pickle_is_denied(rank):
    easydist.allow_pickle(False)
    try:
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        easydist.synchronize_rng_states(["torch", "numpy", "python", "generator"], torch.Generator().manual_seed(rank))
        drawn = [torch.rand(1).item(), float(np.random.rand()), random.random()]
    finally:
        easydist.allow_pickle(True)
    assert easydist.gather_object([drawn]) == [drawn] * 2


@pytest.mark.slow
def test_the_environment_denies_pickle():
    code = "import easydist.format.codec; print(easydist.format.codec.is_pickle_allowed())"
    assert launching.forked("-c", code, EASYDIST_PICKLE=0)[0] == "False\n"

    assert codec.is_pickle_allowed()
