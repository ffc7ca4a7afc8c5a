"""Laws of send_to_device."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
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


class Movable:
    """Has a ``.to`` of its own, without ``non_blocking``."""

    def __init__(self):
        self.moves = []

    def to(self, device):
        self.moves.append(device)
        return self


class Hostile(UserDict):
    """A mapping whose ``.to`` changes it in place, as BatchEncoding's does."""

    def to(self, device, **_):
        self.data = {"spoilt": device}
        return self


@dataclass
class Record:
    """A dataclass whose ``.to`` changes it in place."""

    x: object

    def to(self, device, **_):
        self.x = device
        return self


@pytest.mark.parametrize("name", CASES)
def test_send_to_device_changes_arrays_only(name):
    data = {"x": [CASES[name]()]}
    got = easydist.send_to_device(data, "cpu")["x"][0]
    want = data["x"][0]
    if isinstance(want, np.ndarray):
        assert_same(got.numpy(), want.astype(want.dtype.newbyteorder("=")))
    else:
        assert_same(got, want, identity=not isinstance(want, torch.Tensor))


def test_send_to_device_leaves_its_input_alone():
    data = {"a": np.ones(1), "b": batch_encoding(), "c": Batch(np.ones(1)), "d": [torch.ones(1)]}
    kept = dict(data)
    got = easydist.send_to_device(data, "meta")
    assert all(data[key] is kept[key] for key in data)
    assert type(data["c"].ids) is np.ndarray
    assert data["b"]["input_ids"].device.type == data["d"][0].device.type == "cpu"
    assert got["b"]["input_ids"].device.type == got["c"].ids.device.type == got["d"][0].device.type == "meta"


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


@pytest.mark.parametrize("make", [batch_encoding, model_output, tensordict], ids=lambda make: make.__name__)
def test_skip_keys_is_honoured_inside_an_object_that_has_to_which_is_not_mutated(make):
    data = make()
    keys = list(data.keys())
    first = data[keys[0]]
    got = easydist.send_to_device(data, "meta", skip_keys=keys[0])
    assert type(got) is type(data)
    assert got[keys[0]] is first or make is tensordict
    assert got[keys[0]].device.type == "cpu"
    assert data[keys[0]] is first or make is tensordict
    assert_same(data, make())


def test_a_mapping_is_not_sent_by_its_own_to():
    data = Hostile(a=torch.ones(1), b=torch.ones(1))
    got = easydist.send_to_device({"h": data}, "meta", skip_keys="b")["h"]
    assert [got[key].device.type for key in "ab"] == ["meta", "cpu"]
    assert data.keys() == {"a", "b"}


def test_a_dataclass_is_not_sent_by_its_own_to():
    got = easydist.send_to_device(Record(torch.ones(1)), "meta")
    assert got.x.device.type == "meta"


def test_other_objects_with_to_are_sent_by_it():
    thing = Movable()
    assert easydist.send_to_device([thing], "cpu")[0] is thing
    assert thing.moves == ["cpu"]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert easydist.send_to_device(packed, "meta").data.device.type == "meta"
    assert easydist.send_to_device([Movable], "cpu") == [Movable]
