"""The gradients of ``differentiable=True``, compared with those of one process that has all ranks' inputs."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import BACKENDS, made, short_rows
from launching import sampled
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import easydist
from easydist import DisagreementError
from easydist.testing import distributed

ALL = sampled((1, 2, 3, 4))
EXACT = {"atol": 0, "rtol": 0}


def last(size):
    """A source that is not rank 0 if there are several ranks."""
    return size - 1


def parts(x, size, dim=0):
    return torch.tensor_split(x, size, dim)


VERBS = {
    "gather": (
        lambda x, size, **options: easydist.gather(x, **options),
        lambda xs: [torch.cat([x.reshape(-1) if x.ndim == 0 else x for x in xs])] * len(xs),
    ),
    "gather along dim 1": (
        lambda x, size, **options: easydist.gather(x, dim=1, **options),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
    ),
    "gather as a list": (
        lambda x, size, **options: torch.cat(easydist.gather(x, as_list=True, **options)),
        lambda xs: [torch.cat(xs)] * len(xs),
    ),
    "sum": (
        lambda x, size, **options: easydist.reduce(x, "sum", 3.0, **options),
        lambda xs: [3 * sum(xs)] * len(xs),
    ),
    "mean": (lambda x, size, **options: easydist.reduce(x, **options), lambda xs: [sum(xs) / len(xs)] * len(xs)),
    "none": (lambda x, size, **options: easydist.reduce(x, "none", 2.0, **options), lambda xs: [2 * x for x in xs]),
    "broadcast": (
        lambda x, size, **options: easydist.broadcast(x, last(size), **options),
        lambda xs: [xs[-1].clone()] * len(xs),
    ),
    "scatter": (
        lambda x, size, **options: easydist.scatter(x, last(size), **options),
        lambda xs: [*parts(xs[-1], len(xs))],
    ),
    "all_to_all": (
        lambda x, size, **options: easydist.all_to_all(x, **options),
        lambda xs: [torch.cat(column) for column in zip(*[parts(x, len(xs)) for x in xs], strict=True)],
    ),
    "all_to_all along dim 1": (
        lambda x, size, **options: easydist.all_to_all(x, dim=1, **options),
        lambda xs: [torch.cat(column, 1) for column in zip(*[parts(x, len(xs), 1) for x in xs], strict=True)],
    ),
}
UNEVEN = {"gather", "gather along dim 1", "gather as a list", "all_to_all", "all_to_all along dim 1"}


def inputs(name, size, dtype, rows=3):
    """Return one input per rank, of sizes that differ where the verb takes that."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[rows, 4] for _ in range(size)]
    for rank in range(size if name in UNEVEN else 0):
        shapes[rank]["dim 1" in name] = [5, 0, 2, 1][rank]
    values = [torch.randn(shape, generator=generator, dtype=torch.complex128) for shape in shapes]
    return [(value if dtype.is_complex else value.real).to(dtype).requires_grad_() for value in values]


def loss_of(out, rank):
    """Return a loss of this rank that is different on each and not linear."""
    wide = out.to(torch.promote_types(out.dtype, torch.float32) if out.dtype.itemsize > 1 else torch.float32)
    values = wide**2 * (rank + 1 + torch.arange(out.numel()).view(out.shape))
    return values.real.sum() + 2 * values.imag.sum() if values.is_complex() else values.sum()


def oracle(name, xs):
    """Return the gradients of the sum of all ranks' losses."""
    loss = sum(loss_of(out, rank) for rank, out in enumerate(VERBS[name][1](xs)))
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(xs, torch.autograd.grad(loss, xs, allow_unused=True), strict=True)
    ]


def gradient(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


@BACKENDS
@distributed(world_size=ALL)
def test_the_gradient_is_that_of_one_process(rank, world_size, backend):
    with made(backend) as group:
        for name, dtype in itertools.product(VERBS, (torch.float64, torch.complex64)):
            xs = inputs(name, world_size, dtype)
            want = oracle(name, xs)
            out = VERBS[name][0]({"x": xs[rank]}["x"], world_size, differentiable=True, group=group)
            assert out.dtype == dtype
            loss_of(out, rank).backward()
            torch.testing.assert_close(gradient(xs[rank]), want[rank])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e4m3fn], ids=str
)
@distributed(world_size=3)
def test_every_dtype_that_can_require_grad(rank, world_size, dtype):
    for name in ("gather", "mean", "broadcast", "scatter", "all_to_all"):
        check_dtype(rank, world_size, name, dtype)


def check_dtype(rank, world_size, name, dtype):
    xs = inputs(name, world_size, dtype)
    out = VERBS[name][0](xs[rank], world_size, differentiable=True)
    weight = torch.full(out.shape, 0.5 * (rank + 1)).to(dtype)
    out.backward(weight)
    wide = [x.detach().to(torch.complex128).requires_grad_() for x in xs]
    outs = VERBS[name][1](wide)
    torch.autograd.backward(outs, [torch.full(out.shape, 0.5 * (r + 1)).to(out.dtype) for r, out in enumerate(outs)])
    assert gradient(xs[rank]).dtype == dtype
    torch.testing.assert_close(
        gradient(xs[rank]).to(torch.complex128),
        gradient(wide[rank]),
        rtol=2**-3 if dtype.itemsize == 1 else 2**-7,
        atol=0,
    )


def replicated(verb, rank, world_size):
    """Turn a verb into a function of one tensor that is equal on all ranks, as gradcheck moves it on all of them.

    The mean of equal tensors is the tensor; backward, the mean of the gradients, adds what each rank contributes.
    """

    def function(*xs):
        same = easydist.reduce([*xs], differentiable=True)
        out = verb(same[rank % len(same)], world_size, differentiable=True)
        return easydist.reduce(loss_of(out, rank), "sum", differentiable=True)

    return function


REAL, COMPLEX = torch.float64, torch.complex128
CHECKED = [(name, dtype) for i, name in enumerate(VERBS) for dtype in ((COMPLEX, REAL) if i % 2 else (REAL, COMPLEX))]
"""The sample is each verb with one of both, in turn."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), sampled(CHECKED))
@distributed(world_size=(1, 3))
def test_gradcheck_and_gradgradcheck(rank, world_size, name, dtype):
    torch.manual_seed(0)  # gradgradcheck draws
    columns = 1 if dtype.is_complex else 2  # which have two parts
    xs = inputs("sum", 1 if "gather" not in name else 2, dtype)
    xs = [x.detach()[:2, :columns].clone().requires_grad_() for x in xs]
    function = replicated(VERBS[name][0], rank, world_size)
    assert gradcheck(function, xs)
    assert gradgradcheck(function, xs)


TREE = {
    "w": lambda rank: torch.arange(3.0).requires_grad_(),
    "one": lambda rank: torch.arange(2.0).requires_grad_(rank == 0),
    "fixed": lambda rank: torch.ones(2),
    "ids": lambda rank: torch.arange(2),
    "list": lambda rank: [torch.ones(2, dtype=torch.bfloat16, requires_grad=True), 0.5],
    "array": lambda rank: np.ones(2),
    "text": lambda rank: "a",
}


def tree_of(rank):
    return {name: make(rank) for name, make in TREE.items()}


def flags(data):
    return [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in easydist.tree.leaves(data)]


@pytest.mark.parametrize("verb", ["gather", "sum", "broadcast", "scatter", "all_to_all"])
@distributed(world_size=(2, 3))
def test_a_leaf_has_a_gradient_if_it_requires_grad_on_any_rank(rank, world_size, verb):
    data = tree_of(rank)
    if verb in ("scatter", "all_to_all"):
        del data["list"][1]  # which has no dimension
    out = VERBS[verb][0](data, world_size, differentiable=True)
    of_source = verb in ("broadcast", "scatter")  # whose leaf "one" does not require grad
    assert flags(out)[:4] == [True, not of_source, False, False]
    assert out["list"][0].requires_grad
    assert out["text"] == "a"
    assert isinstance(out["array"], np.ndarray)
    sum(leaf.sum() for leaf in easydist.tree.leaves(out) if getattr(leaf, "requires_grad", False)).backward()
    if not of_source or rank == last(world_size):
        count = 1 if verb in ("scatter", "all_to_all") else 3 * world_size if verb == "sum" else world_size
        assert data["w"].grad.tolist() == [count] * 3
        assert data["list"][0].grad.tolist() == [count] * 2
        assert (data["one"].grad is None) == (rank != 0 or of_source)


@pytest.mark.parametrize("verb", [easydist.gather, easydist.reduce, easydist.broadcast])
@distributed(world_size=2)
def test_a_leaf_with_a_gradient_is_a_tensor_on_all_ranks(rank, verb):
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    for other in (np.array([0.5]), np.full((1,), 0.5)):
        out = verb({"x": other if rank else x}, differentiable=True)["x"]
        assert isinstance(out, torch.Tensor)
        assert out.requires_grad
        x.grad = None
        out.sum().backward()
        assert rank == 1 or x.grad is not None
    scalar = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    out = easydist.reduce(0.5 if rank else scalar, "sum", differentiable=True)
    out.backward()
    assert rank or scalar.grad == 2
    out = easydist.reduce(0.5 if rank else scalar, "none", 3.0, differentiable=True)
    assert out == 1.5
    out.backward()
    assert rank or scalar.grad == 5


@pytest.mark.parametrize("numel", [3, 100_000])
@distributed(world_size=(1, 2))
def test_tied_leaves_stay_tied(rank, world_size, numel):
    x = torch.ones(numel, requires_grad=True)
    for out, factor in (
        (easydist.gather([x, x], differentiable=True), world_size),
        (easydist.reduce([x, x], "sum", differentiable=True), world_size),
        (easydist.reduce([x, x], "sum"), 1),
    ):
        assert out[0] is out[1]
        x.grad = None
        (out[0] * out[1]).sum().backward()
        assert x.grad.unique().tolist() == [2 * factor * (world_size if out[0].shape == x.shape else 1)]


@pytest.mark.parametrize("numel", [3, 100_000])
@distributed(world_size=(1, 2))
def test_broadcast_writes_nothing_in_place_and_receivers_may_have_nothing(rank, world_size, numel):
    mine = torch.full((numel,), float(rank), requires_grad=True)
    array = np.full(2, float(rank))
    view = torch.ones(2).expand(numel, 2)  # which could not be written in place
    out = easydist.broadcast({"x": mine, "a": array, "v": view}, differentiable=True)
    assert mine.unique().tolist() == [rank]
    assert array.tolist() == [rank, rank]
    assert out["x"].unique().tolist() == out["a"].tolist()[:1] == [0]
    out["x"].add_(1)
    assert mine.unique().tolist() == [rank]
    out["x"].sum().backward()
    assert gradient(mine).unique().tolist() == [0 if rank else world_size]
    for verb in (easydist.broadcast, easydist.scatter):
        mine.grad = None
        out = verb(None if rank else [mine], differentiable=True)[0]
        assert out.requires_grad
        (out * 2).sum().backward()
        assert rank or mine.grad.unique().tolist() == [2 * world_size if verb is easydist.broadcast else 2]


@distributed(world_size=(1, 2))
def test_leaves_without_dimensions_and_without_elements(rank, world_size):
    scalar, empty = torch.tensor(2.0 + rank, requires_grad=True), torch.empty(0, 3, requires_grad=True)
    out = easydist.gather({"s": scalar, "e": empty}, differentiable=True)
    ((out["s"] ** 2).sum() + out["e"].sum()).backward()
    assert scalar.grad == 2 * scalar * world_size
    assert empty.grad.shape == (0, 3)
    apart = easydist.gather({"s": scalar}, as_list=True, differentiable=True)
    (own,) = torch.autograd.grad(sum(one["s"] for one in apart), scalar)
    assert own == world_size


@distributed(world_size=2)
def test_results_can_be_changed_in_place(rank):
    tree = {name: torch.ones(3, requires_grad=True) for name in "abc"}
    for verb in (easydist.gather, easydist.reduce, easydist.broadcast, easydist.scatter, easydist.all_to_all):
        out = verb(tree, differentiable=True)
        kept = out["b"] ** 2
        out["a"].mul_(2)
        out["c"].zero_()
        (out["a"].sum() + kept.sum()).backward()  # the change of other leaves does not count as one of "b"
    assert tree["c"].grad.unique().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@distributed(world_size=(2, 3))
def test_a_tree_that_is_not_the_source_s_has_zeros(rank, world_size, dtype):
    for verb in (easydist.broadcast, easydist.scatter):
        tree = [torch.ones(shape).to(dtype).requires_grad_() for shape in ((6, 2), (6,))]
        for create_graph in (False, True):
            out = [to_wide(leaf) for leaf in verb(tree, differentiable=True)]
            loss = sum((leaf**2).real.sum() for leaf in out)
            found = torch.autograd.grad(loss, tree, create_graph=create_graph)
            again = torch.autograd.grad(sum(to_wide(one).real.sum() for one in found), tree) if create_graph else found
            count = 0 if rank else 2 * (world_size if verb is easydist.broadcast else 1)
            for one, other, leaf in zip(found, again, tree, strict=True):
                assert torch.equal(to_wide(one), torch.full(leaf.shape, count, dtype=to_wide(one).dtype))
                assert torch.equal(to_wide(other), to_wide(one))


def to_wide(leaf):
    return leaf if leaf.is_complex() else leaf.double()


@distributed(world_size=2)
def test_no_zeros_for_leaves_that_no_verb_takes(rank):
    leaves = [torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)]
    for ignored in [leaf.requires_grad_() for leaf in leaves]:
        own = torch.ones(2, requires_grad=True)
        easydist.scatter([own, ignored] if rank else own, differentiable=True).sum().backward()
        assert ignored.grad is None
        assert own.grad.tolist() == ([0, 0] if rank else [1, 1])


WITHOUT = {
    "gather: differentiable=True, but no leaf has a": lambda: easydist.gather(torch.arange(3), differentiable=True),
    "broadcast: differentiable=True, but no leaf": lambda: easydist.broadcast([1, True], differentiable=True),
    "scatter: differentiable=True, but no leaf": lambda: easydist.scatter(torch.arange(3), differentiable=True),
    "all_to_all: differentiable=True, but no": lambda: easydist.all_to_all(torch.arange(3), differentiable=True),
    "reduce: differentiable=True, but no leaf": lambda: easydist.reduce(torch.arange(3), differentiable=True),
    "'sum', 'mean' and 'none'; 'max' has": lambda: easydist.reduce(torch.ones(3), "max", differentiable=True),
}


@distributed(world_size=(1, 2))
def test_what_has_no_gradient_is_a_type_error_on_all_ranks(rank, world_size):
    for text, call in WITHOUT.items():
        with pytest.raises(TypeError, match=text):
            call()
        assert easydist.gather(torch.tensor([rank])).tolist() == [*range(world_size)]


@pytest.mark.parametrize("name", [name for name in VERBS if name != "none"])
@distributed(world_size=(1, 2))
def test_a_batch_of_gradients_is_a_type_error_on_all_ranks(rank, world_size, name):
    x = torch.ones(2 * world_size, 2 * world_size, requires_grad=True)
    for _ in range(2):
        out = VERBS[name][0](x, world_size, differentiable=True)
        with pytest.raises(TypeError, match="stands for a batch of gradients"):
            torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)
    assert easydist.gather(torch.tensor([rank])).tolist() == [*range(world_size)]


@distributed(world_size=2)
def test_a_source_without_a_gradient_is_a_type_error_of_receivers_too(rank):
    for verb in (easydist.broadcast, easydist.scatter):
        with pytest.raises(TypeError, match="no leaf has a floating-point or complex dtype"):
            verb(None if rank else torch.arange(3), differentiable=True)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


@distributed(world_size=2)
def test_a_result_on_one_rank_is_refused(rank):
    for verb in (easydist.gather, easydist.reduce):
        with pytest.raises(ValueError, match=f"^{verb.__name__}: differentiable=True needs a result on every rank"):
            verb(torch.ones(2), dst=0, differentiable=True)
    x = torch.ones(2, requires_grad=True)
    own = easydist.reduce(x, "sum", dst=1)  # which needs no other rank
    if rank:
        own.sum().backward()
    assert (x.grad is None) == (rank == 0)


@distributed(world_size=2)
def test_without_grad_mode_there_is_no_graph_and_all_ranks_have_to_do_the_same(rank):
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not easydist.gather(x, differentiable=True).requires_grad
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(DisagreementError, match=r"differentiable=True, no_grad=True"),
    ):
        easydist.gather(x, differentiable=True)
    with pytest.raises(DisagreementError, match=r"differentiable=True"):
        easydist.gather(x, differentiable=rank == 0)
    easydist.reduce(x, differentiable=True).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("check", [True, False])
@distributed(world_size=2)
def test_headers_are_exchanged_with_check_false_too(rank, check):
    x = torch.ones(2, requires_grad=rank == 0)
    for verb in (easydist.reduce, easydist.broadcast):
        out = verb(x, differentiable=True, check=check)
        assert out.requires_grad
        out.sum().backward()
    assert rank or x.grad.tolist() == [3, 3]


@distributed(world_size=2)
def test_many_leaves(rank):
    tree = {str(i): torch.ones(1 + rank, requires_grad=i == 4000 and rank == 1) for i in range(5000)}
    out = easydist.gather(tree, differentiable=True)
    assert [name for name, leaf in out.items() if leaf.requires_grad] == ["4000"]
    out["4000"].sum().backward()
    assert rank == 0 or tree["4000"].grad.tolist() == [2, 2]


@pytest.mark.slow
@distributed(world_size=2)
def test_too_many_leaves_are_an_error_on_all_ranks(rank):
    rows = [torch.ones(1, requires_grad=True), *torch.ones(131_072, 1).unbind()]
    with short_rows() as group:
        with pytest.raises(ValueError, match="at most 131072 leaves, got 131073; stack some of them"):
            easydist.gather(rows, differentiable=True, group=group)
        easydist.gather(rows[0], differentiable=True, group=group).sum().backward()


def layers(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()


def data(rank):
    return torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def contrast(rows):
    return (rows @ rows.T).logsumexp(1).sum()


def alone(size, call=lambda model, x: model(x)):
    """Return the gradients of one process with the rows of all ranks."""
    model = layers()
    contrast(torch.cat([call(model, data(rank)) for rank in range(size)])).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "easydist_shm"])
@distributed(world_size=(2, 3))
def test_under_ddp(rank, world_size, backend):
    import easydist.process_group  # registers the backend

    model = layers()
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
    # Each rank computes the whole loss: W times its gradient, which DDP's mean over ranks divides by W.
    contrast(easydist.gather(wrapped(data(rank)), differentiable=True)).backward()
    for p, want in zip(model.parameters(), alone(world_size), strict=True):
        torch.testing.assert_close(p.grad, want)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(world_size=(1, 2, 3))
def test_under_activation_checkpointing(rank, world_size, reentrant):
    model, x = layers(), data(rank).requires_grad_()

    def block(x):
        rows = easydist.gather(model(x), differentiable=True)
        return easydist.reduce((rows @ rows.T).logsumexp(1), differentiable=True).sin()

    def all_blocks(wrap):
        model.zero_grad()
        out = wrap(block)(x)
        (wrap(lambda y: easydist.reduce(y * y, "sum", differentiable=True))(out)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = all_blocks(lambda fn: fn)
    got = all_blocks(lambda fn: lambda x: checkpoint(fn, x, use_reentrant=reentrant))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@distributed(world_size=2)
def test_under_autocast(rank, world_size):
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model.float()(x.float())

    model = layers()
    out = call(model, data(rank))
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        rows = easydist.gather(out, differentiable=True)
        assert rows.dtype == torch.bfloat16
        loss = contrast(rows.float())
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        reference = layers()
        contrast(torch.cat([call(reference, data(r)) for r in range(world_size)]).float()).backward()
    for p in model.parameters():
        p.grad = easydist.reduce(p.grad)
    for p, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, want.grad, rtol=0.05, atol=0.05)
