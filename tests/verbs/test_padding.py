"""pad_across_processes makes all ranks' leaves as long as the longest; unpad undoes it."""

import warnings

import numpy as np
import pytest
import torch

import easydist
from easydist import CannotPadNestedTensorWarning, DisagreementError, RemoteError
from easydist.testing import distributed
from easydist.testing.conformance import MOVED, sample

ALL = (1, 2, 3, 4)


@distributed(world_size=ALL)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("pad_first", [False, True])
def test_pads_to_the_longest_rank(rank, world_size, dim, pad_first):
    shape = [3, 4, 5]
    shape[dim] = rank + 1
    x = torch.arange(float(np.prod(shape))).view(shape)
    got = easydist.pad_across_processes({"x": x, "s": "text"}, dim, -7, pad_first)["x"]
    assert got.shape[dim] == world_size
    start = world_size - rank - 1 if pad_first else 0
    assert torch.equal(got.narrow(dim, start, rank + 1), x)
    assert (got == -7).sum() == got.numel() - x.numel()
    assert torch.equal(easydist.unpad(got, x, dim, pad_first), x)


@distributed(world_size=(2, 3))
def test_every_dtype_is_kept_and_bits_survive(rank, world_size):
    mine = {str(dtype): sample(rank, rank + 2, dtype) for dtype in MOVED}
    padded = easydist.pad_across_processes(mine)
    everyone = easydist.gather(padded)
    for dtype in MOVED:
        assert padded[str(dtype)].dtype == dtype
        assert everyone[str(dtype)].shape == (world_size * (world_size + 1),)
        got = easydist.unpad(padded, mine)[str(dtype)]
        assert got.contiguous().view(torch.uint8).tolist() == mine[str(dtype)].view(torch.uint8).tolist()


@distributed(world_size=2)
def test_bool_stays_bool_through_pad_and_gather(rank):
    padded = easydist.pad_across_processes(torch.ones(rank + 1, dtype=torch.bool))
    assert easydist.gather(padded).tolist() == [True, False, True, True]


@distributed(world_size=2)
def test_leaves_pad_on_their_own_and_equal_ones_stay_the_same_object(rank):
    data = {"same": torch.ones(2), "ragged": torch.ones(1 + rank), "array": np.ones(2 - rank, np.int16)}
    got = easydist.pad_across_processes(data)
    assert got["same"] is data["same"]
    assert got["ragged"].tolist() == [1.0, float(rank)]
    assert got["array"].tolist() == [1, 1 - rank]
    assert got["array"].dtype == np.int16


@distributed(world_size=(1, 2, 3))
def test_leaves_without_the_dim_come_back_as_they_are(rank, world_size):
    """As transformers' Trainer has it, which pads labels of one dimension along dim 1."""
    data = {"labels": torch.ones(3 + rank), "logits": torch.ones(2, 1 + rank), "loss": 0.5, "n": np.ones(1 + rank)}
    got = easydist.pad_across_processes(data, dim=1, pad_index=-100)
    assert all(got[name] is data[name] for name in ("labels", "loss", "n"))
    assert got["logits"].shape == (2, world_size)
    alone = torch.ones(2, 2)
    assert easydist.pad_across_processes(alone, dim=3) is alone
    assert easydist.pad_across_processes(torch.ones(1 + rank, 2), dim=-2).shape == (world_size, 2)


@distributed(world_size=2)
def test_a_leaf_that_has_the_dim_on_some_ranks_only_is_an_error(rank):
    with pytest.raises(DisagreementError, match=r"rank 0: _Unpadded.LEAF   rank 1: float32 \(2, 2\)"):
        easydist.pad_across_processes({"x": torch.ones(2, 2) if rank else torch.ones(2)}, dim=1)


@pytest.mark.parametrize("pad_first", [False, True])
@distributed(world_size=(1, 2, 3))
def test_gradients_flow_through(rank, world_size, pad_first):
    x = torch.arange(1.0, 2 + rank, requires_grad=True)
    y = torch.ones(2, 1 + rank, requires_grad=True)
    padded = easydist.pad_across_processes({"x": x, "y": y}, dim=-1, pad_first=pad_first)
    (padded["x"] ** 2).sum().backward()
    (3 * padded["y"]).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert torch.equal(y.grad, torch.full_like(y, 3))


@distributed(world_size=2)
def test_a_filling_of_several_numbers_is_an_error(rank):
    with pytest.raises(ValueError, match=r"pad_index has to be one number, got \(2,\)"):
        easydist.pad_across_processes(torch.ones(1 + rank), pad_index=torch.ones(2))
    assert easydist.pad_across_processes(torch.ones(1 + rank), pad_index=torch.tensor([[3]])).tolist()[1:] == [
        1.0 if rank else 3.0
    ]


@distributed(world_size=2)
def test_a_filling_that_the_dtype_cannot_hold_is_an_error(rank):
    for dtype, filling in ((torch.uint8, -100), (torch.bool, 2), (torch.int64, 0.5)):
        with pytest.raises(ValueError, match=f"cannot hold pad_index={filling}"):
            easydist.pad_across_processes(torch.ones(rank + 1, dtype=dtype), pad_index=filling)


@pytest.mark.parametrize("filling", [float("-inf"), float("inf"), float("nan")])
@distributed(world_size=(2, 3))
def test_a_filling_that_is_no_finite_number(rank, world_size, filling):
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    got = easydist.pad_across_processes({str(dtype): torch.ones(rank + 1, dtype=dtype) for dtype in kinds}, 0, filling)
    for dtype in kinds:
        want = torch.cat([torch.ones(rank + 1), torch.full((world_size - rank - 1,), filling)])
        assert got[str(dtype)].dtype == dtype
        assert str(got[str(dtype)].tolist()) == str(want.to(dtype).tolist())
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(ValueError, match=f"{dtype}, which cannot hold pad_index={filling}"):
            easydist.pad_across_processes(torch.ones(rank + 1, dtype=dtype), pad_index=filling)


@distributed(world_size=2)
def test_other_dims_may_differ_but_not_their_number(rank):
    padded = easydist.pad_across_processes(torch.ones(rank, 3 + rank), dim=1)  # the last batch has no rows on rank 0
    assert padded.shape == (rank, 4)
    assert easydist.gather(padded).shape == (1, 4)
    with pytest.raises(DisagreementError, match=r"rank 0: float32 \(1, 3\)   rank 1: float32 \(1, 3, 2\)"):
        easydist.pad_across_processes(torch.ones((1, 3, 2)[: 2 + rank]))
    with pytest.raises(DisagreementError, match=r"rank 0: float32 \(1, 3\)   rank 1: int64 \(1, 3\)"):
        easydist.pad_across_processes(torch.ones(1, 3, dtype=torch.int64 if rank else torch.float32))


@distributed(world_size=2)
def test_nested_tensors_stay_and_warn(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.warns(CannotPadNestedTensorWarning, match="nested tensors have no common size to pad to"):
        got = easydist.pad_across_processes({"nested": nested, "x": torch.ones(rank + 1)})
    assert got["nested"] is nested
    assert got["x"].tolist() == [1.0, float(rank)]


def test_unpad_takes_sizes_trees_and_structures():
    x = torch.arange(6).view(2, 3)
    for size in (2, np.int64(2)):
        assert easydist.unpad(x, size, dim=1).tolist() == [[0, 1], [3, 4]]
    like = easydist.get_data_structure({"x": torch.ones(1, 3)})
    assert easydist.unpad({"x": x}, like)["x"].tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match=r"the tensor of shape \(2, 3\) has no 4 elements along dim 0"):
        easydist.unpad(x, 4)
    with pytest.raises(ValueError, match=r"unpad: the trees differ in \['x'\], \['y'\]"):
        easydist.unpad({"x": x}, {"y": x})


@distributed(world_size=2)
def test_the_filling_is_exact_where_the_dtype_allows_it(rank):
    got = easydist.pad_across_processes(torch.ones(rank + 1, dtype=torch.float64), pad_index=0.1)
    assert got.tolist() == [1.0, 1.0 if rank else 0.1]
    huge = easydist.pad_across_processes(torch.ones(rank + 1, dtype=torch.uint64), pad_index=2**64 - 1)
    assert huge.tolist() == [1, 1 if rank else 2**64 - 1]
    with pytest.raises(ValueError, match=r"float16, which cannot hold pad_index=1000000\.0"):
        easydist.pad_across_processes(torch.ones(1, dtype=torch.float16), pad_index=1e6)
    assert easydist.pad_across_processes(torch.ones(1), pad_index=1 if rank else 1.0).tolist() == [1.0]


@distributed(world_size=2)
def test_a_cycle_on_one_rank_is_an_error_for_all(rank):
    data = [torch.ones(2)]
    if rank == 0:
        data.append(data)
    with pytest.raises(RemoteError, match="rank 0: ValueError: the tree has a cycle"):
        easydist.pad_across_processes(data)


@distributed(world_size=2)
@pytest.mark.parametrize("pad_index", [1e6, float("inf"), 2**63])
def test_what_a_small_float_cannot_hold_is_an_error_on_all_ranks(rank, pad_index):
    short = torch.ones(3 + rank).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"float8_e4m3fn, which cannot hold pad_index="):
        easydist.pad_across_processes(short, pad_index=pad_index)
    assert easydist.pad_across_processes(short, pad_index=448).float().tolist()[3:] == [448.0 if rank == 0 else 1.0]


@distributed(world_size=2)
def test_the_number_to_fill_with_may_be_a_scalar_of_any_kind(rank):
    short, scalar = torch.zeros(1 + rank, dtype=torch.int8), torch.tensor(4)
    assert easydist.pad_across_processes(short, pad_index=scalar)[-1] == (4 if rank == 0 else 0)
    scalar.fill_(300)
    with pytest.raises(ValueError, match=r"int8, which cannot hold pad_index=tensor\(300\)"):
        easydist.pad_across_processes(short, pad_index=scalar)
    assert easydist.pad_across_processes(short, pad_index=np.array(5))[-1] == (5 if rank == 0 else 0)
    zeros = easydist.pad_across_processes(torch.ones(1 + rank), pad_index=-0.0)
    assert rank == 1 or str(zeros[-1].item()) == "-0.0"


@distributed(world_size=2)
def test_containers_around_leaves_that_stay_keep_their_type(rank):
    size = torch.Size([3])
    got = easydist.pad_across_processes({"size": size, "x": torch.ones(1 + rank), "n": [rank]})
    assert type(got["size"]) is torch.Size
    assert (got["size"], got["x"].shape, got["n"]) == (size, (2,), [rank])
