"""Laws of send_to_device."""

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import dataclass

import accelerate
import numpy as np
import pytest
import torch
from transformers import BatchFeature
from trees import (
    CASES,
    Batch,
    Box,
    FrozenSlotted,
    Slotted,
    assert_same,
    batch_encoding,
    model_output,
    read_only,
    tensordict,
)

import easydist
import easydist.accelerate


class Movable:
    """Has a ``.to`` of its own, without ``non_blocking``."""

    def __init__(self):
        self.moves = []

    def to(self, device):
        self.moves.append(device)
        return self


class InPlace(UserDict):
    """A mapping whose ``.to`` changes it in place and returns it, as BatchEncoding's does."""

    def to(self, device, **_):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@dataclass
class Record:
    """A dataclass whose ``.to`` changes it in place."""

    x: object

    def to(self, device, non_blocking=False):
        self.x = self.x.to(device, non_blocking=non_blocking)
        return self


@dataclass
class Casting:
    """A dataclass whose ``.to`` also casts."""

    x: object

    def to(self, device):
        return Casting(self.x.to(device).half())


class Anew:
    """An object whose ``.to`` makes another one."""

    def __init__(self, parts):
        self.parts = parts

    def to(self, device, *, non_blocking):
        return Anew([part.to(device, non_blocking=non_blocking) for part in self.parts])


class MovableList(list):
    """A list that moves itself: its items are not looked at."""

    def to(self, device):
        return self


class MovableTuple(tuple):
    """A tuple that moves itself, into a list."""

    def to(self, device, non_blocking=False):
        return ["moved", *self]


class Attributes(dict):
    """A dict whose keys are attributes."""

    __getattr__ = dict.get


@pytest.mark.parametrize("name", CASES)
def test_send_to_device_changes_arrays_only(name):
    data = {"x": [CASES[name]()]}
    got = easydist.send_to_device(data, "cpu")["x"][0]
    want = data["x"][0]
    if isinstance(want, np.ndarray):
        assert_same(got.numpy(), want.astype(want.dtype.newbyteorder("=")))
    else:
        assert_same(got, want, identity=not isinstance(want, torch.Tensor))


def test_send_to_device_leaves_what_it_rebuilds_alone():
    data = {"a": np.ones(1), "b": model_output(), "c": Batch(np.ones(1)), "d": [torch.ones(1)]}
    kept = dict(data)
    got = easydist.send_to_device(data, "meta")
    assert all(data[key] is kept[key] for key in data)
    assert type(data["c"].ids) is np.ndarray
    assert data["b"]["logits"].device.type == data["d"][0].device.type == "cpu"
    assert got["b"]["logits"].device.type == got["c"].ids.device.type == got["d"][0].device.type == "meta"


@pytest.mark.parametrize("make", [Batch, FrozenSlotted, Slotted, Box], ids=lambda cls: cls.__name__)
def test_send_to_device_opens_dataclasses_and_registered_classes(make):
    got = easydist.send_to_device(make([torch.ones(1), np.ones(1)]), "meta")
    inside = got.content if make is Box else getattr(got, "ids", None) or got.x
    assert type(got) is make
    assert [t.device.type for t in inside] == ["meta", "meta"]


def test_send_to_device_keeps_arrays_that_no_tensor_can_hold():
    for array in (np.array(["a"]), np.array([None]), np.zeros(1, "M8[s]"), np.zeros(1, np.longdouble)):
        assert easydist.send_to_device([array], "cpu")[0] is array


def test_send_to_device_copies_a_read_only_array():
    array = read_only()
    easydist.send_to_device(array, "cpu").zero_()
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("skip", ["mask", ["mask"], ("mask", "other")])
def test_skip_keys_holds_at_any_depth(skip):
    data = {"mask": torch.ones(1), "in": [{"mask": [torch.ones(1)], "x": torch.ones(1)}], "ids": OrderedDict(mask=1)}
    got = easydist.send_to_device(data, "meta", skip_keys=skip)
    assert got["mask"] is data["mask"]
    assert got["in"][0]["mask"] is data["in"][0]["mask"]
    assert got["in"][0]["x"].device.type == "meta"


def test_a_number_among_skip_keys_is_a_key_and_no_position():
    got = easydist.send_to_device([torch.ones(1), {0: torch.ones(1), 1: (torch.ones(1),)}], "meta", skip_keys=[0])
    assert [got[0].device.type, got[1][0].device.type, got[1][1][0].device.type] == ["meta", "cpu", "meta"]


def test_skip_keys_does_not_reach_into_objects_that_have_to():
    got = easydist.send_to_device(
        {"x": batch_encoding(), "y": model_output()}, "meta", skip_keys=["input_ids", "logits"]
    )
    assert got["x"]["input_ids"].device.type == "meta", "it is sent by its own method"
    assert got["y"]["logits"].device.type == "cpu"


OBJECTS = {
    "batch encoding": batch_encoding,
    "batch feature": lambda: BatchFeature({"pixels": torch.ones(2, 2), "names": ["a", "b"], "n": 1}),
    "model output": model_output,
    "tensordict": tensordict,
    "mapping in place": lambda: InPlace(a=torch.ones(1), b=torch.ones(1)),
    "dataclass in place": lambda: Record(torch.ones(1)),
    "casting": lambda: Casting(torch.ones(2, dtype=torch.float64)),
    "new object": lambda: Anew([torch.ones(1)]),
    "list": lambda: MovableList([torch.ones(1), 2]),
    "tuple": lambda: MovableTuple((torch.ones(1), 2)),
    "without non_blocking": Movable,
    "module": lambda: torch.nn.Linear(2, 1),
    "packed": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
    "tensor": lambda: torch.ones(1),
    "text": lambda: "text",
}


def shown(value, was):
    """Return everything that a script can notice of a result: types, identity, dtypes, devices, and attributes."""
    seen = [type(value).__name__, value is was]
    if isinstance(value, torch.Tensor):
        return [*seen, value.device.type, value.dtype]
    if isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        return seen + [(key, shown(part, None)) for key, part in parts]
    if isinstance(value, str | int):
        return [*seen, value]
    return seen + [(name, shown(part, None)) for name, part in getattr(value, "__dict__", {}).items()]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("options", [{}, {"non_blocking": True}, {"skip_keys": ["a", "input_ids", "data"]}], ids=str)
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_sent_as_by_accelerate(name, options, nested):
    found = []
    for send in (accelerate.utils.send_to_device, easydist.send_to_device):
        data = value = OBJECTS[name]()
        if nested:
            data = [value, {"in": (value,)}]
        got = send(data, "meta", **options)
        found.append([shown(part, value) for part in ([got[0], got[1]["in"][0]] if nested else [got])])
    assert found[0] == found[1]


def test_identity_and_casts_are_the_same_in_an_accelerate_script():
    data = [InPlace(a=torch.ones(1)), Record(torch.ones(1)), Casting(torch.ones(1)), batch_encoding()]
    with easydist.accelerate.enable():
        got = accelerate.utils.send_to_device(data, "cpu")
    assert [now is was for now, was in zip(got, data, strict=True)] == [True, True, False, True]
    assert got[2].x.dtype == torch.float16


def test_a_key_is_not_a_method():
    got = easydist.send_to_device(Attributes({"to": torch.ones(1), "from": torch.ones(1)}), "meta")
    assert {key: value.device.type for key, value in got.items()} == {"to": "meta", "from": "meta"}


def test_other_objects_with_to_are_sent_by_it():
    thing = Movable()
    assert easydist.send_to_device([thing], "cpu")[0] is thing
    assert thing.moves == ["cpu"]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert easydist.send_to_device(packed, "meta").data.device.type == "meta"
    assert easydist.send_to_device([Movable], "cpu") == [Movable]
