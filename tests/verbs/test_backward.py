"""The exchanges that backward makes: their number and order, their errors on all ranks, and the threads they run in."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from counting import recorded
from groups import BACKENDS, check_works, made, no_memory_from

import easydist
from easydist import CollectiveTimeout, DisagreementError, RemoteError
from easydist.testing import distributed


def exchanged(call):
    with recorded() as operations:
        call()
    return [kind for kind, _ in operations]


@distributed(world_size=(2, 3))
def test_backward_is_one_exchange_for_the_whole_tree(rank):
    tree = {str(i): torch.ones(3 + i % 4, requires_grad=True) for i in range(50)}
    tree |= {"half": torch.ones(5, dtype=torch.float16, requires_grad=True)}
    easydist.wait_for_everyone()  # the first call of a group exchanges more
    for verb, forward, backward in (
        (easydist.gather, [], ["all_to_all"]),
        (easydist.reduce, [], []),
        (easydist.broadcast, [], []),
        (easydist.scatter, ["header", "scatter"], ["all_to_all"]),
        (easydist.all_to_all, ["all_to_all"], ["all_to_all"]),
    ):
        made = []
        assert exchanged(lambda verb=verb, made=made: made.append(verb(tree, differentiable=True))) == [
            "header",
            *forward,
        ]
        loss = sum(leaf.float().sum() for leaf in made[0].values())
        assert exchanged(loss.backward) == ["header", *backward]
    assert exchanged(lambda: easydist.reduce(tree, "none", differentiable=True)["0"].sum().backward()) == ["header"]


@distributed(world_size=2)
def test_results_that_a_rank_does_not_use_count_as_zeros(rank):
    x, y = (torch.ones(2, requires_grad=True) for _ in "xy")
    out = easydist.gather({"x": x, "y": y}, differentiable=True)
    out["y" if rank else "x"].sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [1, 1]


@BACKENDS
@distributed(world_size=2)
def test_backward_passes_in_different_orders_are_a_disagreement(rank, backend):
    with made(backend) as group:
        x = torch.ones(2, requires_grad=True)
        first, second = (easydist.reduce(x, differentiable=True, group=group).sum() for _ in "ab")
        with pytest.raises(DisagreementError) as caught:
            (second if rank else first).backward()
        text = str(caught.value)
        assert "backward of reduce(reduction='mean', scale=1.0, call=" in text
        assert "tests/verbs/test_backward.py:" in text
        check_works(group, backend)
        for loss in (first, second):
            loss.backward()
        assert x.grad.tolist() == [2, 2]


@BACKENDS
@distributed(world_size=2)
def test_a_rank_without_backward_is_a_missed_call(rank, backend):
    with made(backend) as group:
        x = torch.ones(2, requires_grad=True)
        loss = easydist.gather(x, differentiable=True, group=group).sum()
        call = loss.backward if rank else lambda: easydist.gather(torch.ones(2), group=group)
        with pytest.raises(DisagreementError, match=r"backward of gather\(call="):
            call()
        check_works(group, backend)


@pytest.mark.slow
@distributed(world_size=2)
def test_backward_has_the_time_limit_of_the_call(rank):
    x = torch.ones(2, requires_grad=True)
    loss = easydist.gather(x, differentiable=True, timeout=0.3).sum()
    if rank:
        with pytest.raises(CollectiveTimeout, match=r"^backward of gather: ") as caught:
            loss.backward()
        assert "tests/verbs/test_backward.py:" in str(caught.value)
        dist.distributed_c10d._get_default_store().set("late", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["late"])
        with pytest.raises(CollectiveTimeout):
            loss.backward()
    loss = easydist.gather(x, differentiable=True).sum()
    loss.backward()
    assert x.grad.tolist() == [2, 2]


@BACKENDS
@distributed(world_size=2)
def test_an_error_of_one_rank_in_backward_reaches_all(rank, backend):
    with made(backend) as group:
        x = torch.ones(2, requires_grad=True)
        loss = easydist.gather({"x": x}, differentiable=True, group=group)["x"].sum()
        with (
            no_memory_from(1) if rank else contextlib.nullcontext(),
            pytest.raises(MemoryError if rank else RemoteError, match="no memory for a result"),
        ):
            loss.backward()
        check_works(group, backend)
        loss.backward()
        assert x.grad.tolist() == [2, 2]


@distributed(world_size=2)
def test_sparse_gradients(rank):
    x = torch.ones(2, 3, requires_grad=True)
    rows = easydist.gather(x, differentiable=True)
    torch.nn.functional.embedding(torch.tensor([1, 2]), rows, sparse=True).sum().backward()
    assert x.grad[:, 0].tolist() == ([2.0, 0.0] if rank else [0.0, 2.0])


@distributed(world_size=2)
def test_a_graph_can_be_kept_for_a_second_backward(rank):
    x = torch.ones(2, requires_grad=True)
    loss = easydist.gather(x, differentiable=True).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad.tolist() == [4, 4]


@distributed(world_size=2)
def test_a_gradient_penalty(rank):
    x = torch.full((2,), 1.0 + rank, requires_grad=True)
    loss = (easydist.gather(x, differentiable=True) ** 3).sum()  # on both ranks: twice the gradient
    (own,) = torch.autograd.grad(loss, x, create_graph=True)
    assert own.tolist() == (6 * x**2).tolist()
    own.sum().backward()
    assert x.grad.tolist() == (12 * x).tolist()


@distributed(world_size=2)
def test_backward_may_run_in_other_threads(rank):
    x = torch.ones(2, requires_grad=True)
    for _ in range(20):
        loss = easydist.gather(x, differentiable=True).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert x.grad.tolist() == [40, 40]
