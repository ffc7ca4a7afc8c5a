"""A batch without rows is what is left of a batch when its rows are taken away."""

import dataclasses
import enum
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from easydist.metrics import Collate

Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str


class Split(enum.Enum):
    TEST = "test"


def empty(collate_fn, sample):
    return Collate(collate_fn, [sample])([])


def test_with_samples_it_is_the_function():
    assert Collate(None, [])([1, 2]).tolist() == [1, 2]
    assert Collate(len, [])(["a", "b", "c"]) == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.int64])
def test_tensors_keep_dtype_and_trailing_shape(dtype):
    got = empty(None, {"x": torch.ones(2, 3, dtype=dtype), "nested": [torch.ones(4, dtype=dtype)]})
    assert (got["x"].shape, got["x"].dtype) == ((0, 2, 3), dtype)
    assert (got["nested"][0].shape, got["nested"][0].dtype) == ((0, 4), dtype)


def test_the_samples_of_default_collate():
    got = empty(None, (torch.ones(2), 3, 0.5, "id", {"a": True}, Pair(np.ones(3, np.float32), 1)))
    x, n, f, name, flags, pair = got
    assert (x.shape, n.shape, f.dtype, name) == ((0, 2), (0,), torch.float64, ())
    assert (flags["a"].dtype, type(pair), pair.image.shape) == (torch.bool, Pair, (0, 3))


def test_lists_with_one_item_per_sample_are_empty():
    def ragged(samples):
        return {"boxes": samples, "both": [torch.stack(samples), torch.stack(samples)], "pairs": tuple(samples)}

    got = empty(ragged, torch.ones(2, 4))
    assert (got["boxes"], got["pairs"]) == ([], ())
    assert [part.shape for part in got["both"]] == [(0, 2, 4), (0, 2, 4)]


def test_rows_and_tokens_are_counted_and_constants_stay():
    def counted(samples):
        tokens = torch.cat(samples)
        return {
            "rows": len(samples),
            "tokens": tokens,
            "n_tokens": torch.tensor(tokens.numel()),
            "offsets": torch.arange(len(samples) + 1) * 3,
            "padded": pad_sequence(samples, batch_first=True),
            "steps": pad_sequence(samples),
            "classes": torch.arange(10),
            "scale": 0.5,
            "split": Split.TEST,
            "name": "squad",
            "none": None,
            "flag": True,
            "list of names": ["a", "b"],
        }

    got = empty(counted, torch.ones(3))
    assert (got["rows"], got["n_tokens"].item(), got["tokens"].shape, got["padded"].shape) == (0, 0, (0,), (0, 3))
    assert (got["steps"].shape, len(empty(lambda samples: np.stack(samples, -1), np.ones(3)))) == ((3, 0), 3)
    assert (got["offsets"].tolist(), got["classes"].shape) == ([0], (10,))
    rest = {name: got[name] for name in ("scale", "split", "name", "none", "flag", "list of names")}
    assert rest == {name: counted([torch.ones(3)])[name] for name in rest}


def test_dataclasses_and_arrays():
    got = empty(lambda samples: Batch(default_collate(samples), "train"), torch.ones(2))
    assert (type(got), got.x.shape, got.name) == (Batch, (0, 2), "train")
    assert empty(np.stack, np.ones((2, 2), np.float16)).shape == (0, 2, 2)


def test_an_object_of_unknown_rows_is_refused():
    with pytest.raises(
        TypeError, match=r"cannot make a batch without rows: \['graph'\] is a Graph, and its rows are not known"
    ):
        empty(lambda samples: {"graph": type("Graph", (), {})()}, torch.ones(1))
