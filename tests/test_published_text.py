"""The page "Coming from accelerate": what the published text promises, and what differs from accelerate's code."""

from dataclasses import dataclass

import accelerate.utils
import numpy as np
import pytest
import torch
from launching import ROOT

import easydist
from easydist.testing import distributed


@dataclass
class Output:
    logits: object


@distributed(world_size=[1, 2, 3])
def test_reduce_returns_new_tensors(rank, world_size):
    x = torch.full((2,), float(rank))
    got = easydist.reduce({"x": x}, "sum")["x"]
    assert got.tolist() == [sum(range(world_size))] * 2
    assert x.tolist() == [rank] * 2
    assert got is not x
    assert got.shape == x.shape


@distributed(world_size=[2, 3])
def test_every_rank_gets_what_is_gathered_unless_it_asks_otherwise(rank, world_size):
    everyone = list(range(world_size))
    assert easydist.gather(torch.tensor([rank])).tolist() == everyone
    assert easydist.gather_object(obj={"r": rank}) == [{"r": r} for r in everyone]
    to_main = [easydist.gather(torch.tensor([rank]), dst=0), easydist.gather_object([rank], dst=0)]
    assert [one if one is None else list(one) for one in to_main] == ([everyone] * 2 if rank == 0 else [None, None])


@distributed(world_size=2)
def test_receivers_are_written_in_place(rank):
    data = {"x": torch.tensor([rank]), "n": rank}
    got = easydist.broadcast(data, from_process=1)
    assert (data["x"].item(), data["n"], got["n"]) == (1, rank, 1)
    assert (got is data) == (rank == 1)
    config = [{"rank": rank}]
    assert easydist.broadcast_object_list(objects=config, from_process=1) is config
    assert config == [{"rank": 1}]
    assert easydist.pad_across_processes(torch.ones(rank + 1) > 0, pad_first=True).dtype is torch.bool
    with pytest.raises(ValueError, match=r"no xla|torch_xla"):
        easydist.synchronize_rng_states(["torch", "xla"])


def test_only_half_precision_is_converted():
    dtypes = [torch.float64, torch.int64, torch.bool, torch.float16, torch.bfloat16]
    data = {str(dtype): torch.ones(1, dtype=dtype) for dtype in dtypes}
    expected = dtypes[:3] + [torch.float32] * 2
    for convert in (easydist.convert_to_fp32, easydist.convert_outputs_to_fp32, accelerate.utils.convert_to_fp32):
        assert [value.dtype for value in convert(data).values()] == expected


def test_descriptions_of_trees():
    structure = easydist.get_data_structure({"x": torch.ones(1)})
    assert type(structure) is dict
    assert easydist.is_tensor_information(data=structure["x"])
    assert not easydist.is_tensor_information(data=structure)
    assert easydist.find_batch_size({"n": 1}) is None
    assert easydist.concatenate([{"x": torch.ones(1)}, {"x": torch.ones(2)}])["x"].shape == (3,)


ARRAY = np.arange(4, dtype=np.float32)
HALF = Output(torch.ones(3, dtype=torch.float16))
DIFFERENT = {
    "slice_tensors": lambda m: m.slice_tensors({"x": ARRAY}, slice(0, 2))["x"].shape,
    "listify": lambda m: type(m.listify([ARRAY])[0]),
    "find_device": lambda m: m.find_device([HALF]),
    "get_data_structure": lambda m: type(m.get_data_structure([ARRAY])[0]).__name__,
    "convert_to_fp32": lambda m: m.convert_to_fp32(HALF).logits.dtype,
    "convert_outputs_to_fp32": lambda m: m.convert_outputs_to_fp32(lambda: HALF)().logits.dtype,
    "recursively_apply": lambda m: m.recursively_apply(lambda t: t + 1, HALF).logits[0].item(),
    "send_to_device": lambda m: type(m.send_to_device(ARRAY, "cpu")),
    "concatenate": lambda m: outcome(lambda: m.concatenate([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": 1}])),
    "initialize_tensors": lambda m: m.initialize_tensors(m.get_data_structure(torch.ones(1, device="meta"))).device,
    "find_batch_size": lambda m: outcome(lambda: m.find_batch_size([])),
}


def outcome(call):
    try:
        return str(call())
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_the_page_calls_different_is_different(name):
    """Each works with accelerate; the page must not call it the same, or merely better."""
    assert DIFFERENT[name](easydist) != DIFFERENT[name](accelerate.utils)
    page = (ROOT / "docs" / "coming_from_accelerate.md").read_text()
    assert f"| `{name}` | different |" in page
