"""broadcast_state_dict: what receivers have afterwards, what is refused before a byte moves, what it costs."""

import contextlib
import io
import pickle
import sys

import pytest
import resident
import torch
import torch.distributed as dist
from counting import recorded
from groups import BACKENDS, check_works, made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from trees import DTYPES, assert_same

import easydist
from easydist import CollectiveTimeout, DisagreementError, PeerLostError, RemoteError, WireError, weights
from easydist.agreement.agree import shared
from easydist.base.recent import Recent
from easydist.state import communicators
from easydist.testing import distributed
from easydist.transport.comm import Collectives
from easydist.weights import manifest, source, target
from easydist.weights.source import Source
from easydist.weights.target import Target, Wanted

KiB, MiB = 1 << 10, 1 << 20


class Net(nn.Module):
    """Tied weights, a buffer, a frozen parameter, and state that is no tensor."""

    def __init__(self, fill=0.0, device="cpu"):
        super().__init__()
        self.embedding = nn.Embedding(40, 8, device=device)
        self.inner = nn.Sequential(nn.Linear(8, 8, device=device), nn.BatchNorm1d(8, device=device))
        self.head = nn.Linear(8, 40, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.inner[0].bias.requires_grad_(False)
        self.note = {"step": 0}
        with torch.no_grad():
            for i, value in enumerate([*self.parameters(), *self.buffers()]):
                if not value.is_meta:
                    value.copy_(torch.arange(value.numel()).view(value.shape) + fill + i)

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def source_net():
    net = Net(7)
    net.note = {"step": 3, "table": torch.arange(3), "name": "seven"}
    return net


def awkward():
    """Every dtype, odd strides, empty tensors, ties, and a tensor of more than one block."""
    base = torch.arange(2000, dtype=torch.float32)
    every = {
        f"of {dtype}": torch.arange(32, dtype=torch.uint8).view(dtype).clone()
        for dtype in DTYPES
        if dtype != torch.bool
    }
    strided = {
        "t": base.view(40, 50).t(),
        "every other": base[::2],
        "expanded": base[:1].expand(3, 5),
        "scalar": base[7],
    }
    large = torch.arange(300_000, dtype=torch.int32).view(3, -1)
    return {
        **every,
        **strided,
        "large": large,
        "same": large,
        "empty": base[:0],
        "param": nn.Parameter(base[:9]),
    }


def values(state):
    """The values, without strides and classes."""
    return {name: one.detach().contiguous() if isinstance(one, torch.Tensor) else one for name, one in state.items()}


# --- what arrives


@pytest.mark.slow
@distributed(world_size=(1, 2, 3))
def test_every_rank_has_the_sources_weights(rank, world_size):
    last = world_size - 1
    want = awkward()
    for backend in ("shm", "gloo"):
        with made(backend) if world_size > 1 else contextlib.nullcontext() as group:
            sent = awkward()
            got = weights.broadcast_state_dict(
                sent if rank == last else {}, last, bucket_bytes=MiB, group=group, verify=True
            )
            assert_same(values(got), values(want))
            assert list(got) == list(want)
            if rank == last:
                assert got is sent
            else:
                assert got["large"] is got["same"]
            # in place: the same memory, also through strides and a cast
            mine = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in want.items()}
            mine["every other"], mine["t"] = torch.zeros(2000)[::2], torch.zeros(40, 50).t()
            mine["large"] = mine["same"] = torch.zeros(100_000, 3, dtype=torch.int32).t()
            mine["scalar"] = torch.tensor(0.0, dtype=torch.float64)
            before = {name: value.data_ptr() for name, value in mine.items()}
            got = weights.broadcast_state_dict(awkward() if rank == last else mine, last, bucket_bytes=MiB, group=group)
            if rank != last:
                assert got is mine
                assert {name: value.data_ptr() for name, value in mine.items()} == before
                assert_same(values(mine), values(want) | {"scalar": torch.tensor(7.0, dtype=torch.float64)})


@pytest.mark.slow
@distributed(world_size=2)
def test_modules_take_what_load_state_dict_takes(rank):
    want = source_net()
    for receiver in (Net(), Net(device="meta")):
        frozen = receiver.inner[0].bias.requires_grad
        got = weights.broadcast_state_dict(source_net() if rank == 0 else receiver)
        if rank == 0:
            continue
        assert_same(dict(got), dict(want.state_dict()))
        assert receiver.note["table"].tolist() == [0, 1, 2]
        assert receiver.head.weight is receiver.embedding.weight
        assert receiver.inner[0].bias.requires_grad == frozen is False
        assert not any(one.is_meta for one in receiver.state_dict().values() if isinstance(one, torch.Tensor))

    # a tied name that does not come is not missing; names are changed on either side
    def prefixed(name):
        return f"policy.{name}"

    def short(name):
        return name.removeprefix("policy.")

    def untied(name):
        return name != "head.weight"

    receiver = Net(device="meta").bfloat16()
    options = {"filter": untied, "rename": prefixed, "dtype": torch.bfloat16} if rank == 0 else {"rename": short}
    weights.broadcast_state_dict(source_net() if rank == 0 else receiver, **options)
    if rank == 1:
        state = source_net().bfloat16().state_dict()
        assert_same(dict(receiver.state_dict()), dict(state))
        assert receiver.head.weight is receiver.embedding.weight
    # not strict: what only one side has is left out, and stays as it is
    mine = {"a": torch.zeros(2), "mine": torch.ones(1)}
    got = weights.broadcast_state_dict(
        {"a": torch.ones(2), "theirs": torch.ones(3)} if rank == 0 else mine, strict=False
    )
    assert rank == 0 or (got is mine and mine["a"].tolist() == [1, 1] and list(mine) == ["a", "mine"])


@pytest.mark.slow
@distributed(world_size=4)
def test_sharded_sources_are_never_whole(rank):
    from torch.distributed.fsdp import fully_shard

    for kind in ("fsdp", "two dimensions"):
        net = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 5, bias=False))
        with torch.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1000 * i)
        want = {name: value.clone() for name, value in net.state_dict().items()}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "pair"))
        if kind == "fsdp":
            fully_shard(net, mesh=mesh["pair"])  # ranks 0 and 1 hold a model, and ranks 2 and 3 another one
            with torch.no_grad():
                for parameter in net.parameters() if rank > 1 else ():
                    parameter.to_local().zero_()
            src = [0, 1] if rank == 0 else (0, 1)
            got = weights.broadcast_state_dict(net, src, bucket_bytes=4 * KiB, verify=True)  # 2, 3: sharded receivers
            found = {name: value.full_tensor() for name, value in got.items()}
            assert_same(found, want)
            whole = weights.broadcast_state_dict(net if rank < 2 else None, 0, bucket_bytes=KiB)  # the mesh says who
            assert rank < 2 or assert_same(whole, want) is None
        else:
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor

            placed = {
                "a": distribute_tensor(want["0.weight"], mesh, [Shard(1), Shard(0)]),
                "b": distribute_tensor(want["0.weight"], mesh, [Replicate(), Shard(1)]),
                "c": want["0.bias"],
            }
            assert weights.broadcast_state_dict(placed, [2, 0, 1, 3])["c"] is want["0.bias"]


@pytest.mark.slow
@distributed(world_size=4)
def test_a_mesh_in_a_group_that_begins_at_another_rank(rank):
    """The ranks of a mesh are those of the world; in the group they have other numbers."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    group, mesh = dist.new_group([1, 2, 3]), DeviceMesh("cpu", [1, 2])
    whole = torch.arange(6.0)
    if rank:
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)])} if rank < 3 else {}
        got = weights.broadcast_state_dict(state, group=group, group_src=0)
        assert rank < 3 or got["w"].equal(whole)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_sharded_source_reaches_a_rank_outside_its_mesh(rank):
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor

    values = torch.arange(35.0).view(5, 7)
    mesh = DeviceMesh("cpu", [0, 1])
    for placement in (Shard(0), Shard(1)):
        state = {"w": distribute_tensor(values, mesh, [placement]), "n": torch.ones(2)} if rank < 2 else None
        got = weights.broadcast_state_dict(state, verify=True)
        assert rank < 2 or (assert_same(got, {"w": values, "n": torch.ones(2)}) is None)
    cut = {"w": distribute_tensor(values, mesh, [Shard(0)])} if rank < 2 else {"w": torch.ones(5, 7)}
    with pytest.raises(DisagreementError, match=r"ranks \[0, 2\] together do not hold all of w"):
        weights.broadcast_state_dict(cut, [0, 2])
    partial = {"w": DTensor.from_local(values, mesh, [Partial()])} if rank < 2 else {}
    with pytest.raises(RemoteError, match=r"redistribute\(\) it first"):
        weights.broadcast_state_dict(partial)
    assert weights.broadcast_state_dict({"a": 1} if rank == 0 else None) == {"a": 1}


def tied():
    model = nn.ModuleDict({"z": nn.Linear(2, 3, bias=False), "a": nn.Linear(2, 3, bias=False)})
    model["a"].weight = model["z"].weight
    return model


@pytest.mark.slow
@distributed(world_size=2)
def test_tied_weights_that_are_apart_on_the_source_are_those_that_load_state_dict_writes_last(rank):
    for dtypes in ((torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float32)):
        names = zip(("a.weight", "z.weight"), (1.0, 2.0), dtypes, strict=True)
        sent = {name: torch.full((3, 2), fill, dtype=dtype) for name, fill, dtype in names}
        want, got = tied(), tied()
        want.load_state_dict(sent)
        weights.broadcast_state_dict(sent if rank == 0 else got)
        assert rank == 0 or torch.equal(got["a"].weight, want["a"].weight)


# --- what is refused


def packed_floats(fill):
    return torch.full((1,), fill, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


REFUSED = {
    "meta": (lambda: torch.ones(2, device="meta"), "is a meta tensor, which has no data"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "not a dense tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "uninitialized": (lambda: nn.LazyLinear(2).weight, r"\['bad'\] is not initialized yet"),
    "object": (lambda: object(), "is an object"),
}


@pytest.mark.slow
@distributed(world_size=3)
def test_all_ranks_raise_or_none(rank):
    target = {"w": torch.zeros(2, 3), "x": torch.zeros(1)}

    def refused(error, match, mine, src=0, **options):
        with pytest.raises(error, match=match):
            weights.broadcast_state_dict(mine, src, **options)
        assert not target["w"].any()

    for make, match in REFUSED.values():
        refused(RemoteError, match, {"w": torch.ones(2, 3), "bad": make()} if rank == 0 else target)
    for name in ("sparse", "nested", "uninitialized"):
        make, match = REFUSED[name]
        sent = {"w": torch.ones(2, 3), "bad": torch.ones(2)}
        refused(RemoteError, f"rank 1: TypeError: .*{match}", sent if rank == 0 else target | {"bad": make()})
    refused(RemoteError, r"\['weight'\] is not initialized yet", nn.Linear(2, 2) if rank == 0 else nn.LazyLinear(2))
    refused(ValueError, "src=3 is not a rank of the group", target, 3)
    refused(ValueError, "has to name each source once", target, [])
    refused(DisagreementError, "src=1", target, 1 if rank == 1 else 0)
    refused(RemoteError, "pass a module or a dict of tensors, got int", 5 if rank == 0 else target)
    refused(RemoteError, "pass a module or a dict of tensors, got int", target if rank == 0 else 5)
    good = {"w": torch.ones(2, 3), "x": torch.ones(1)}
    misfits = {
        "x  rank 0: float32 (1,)   rank 1: missing": {"w": target["w"]},
        "y  rank 0: missing   rank 1: float32 (1,)": target | {"y": torch.zeros(1)},
        "w  rank 0: float32 (2, 3)   rank 1: float32 (3, 2)": target | {"w": torch.zeros(3, 2)},
        "w  rank 0: float32 (2, 3)   rank 1: int64 (2, 3)": target | {"w": torch.zeros(2, 3, dtype=torch.int64)},
        "x  rank 0: float32 (1,)   rank 1: float4_e2m1fn_x2 (1,)": target | {"x": packed_floats(1)},
        "w  rank 0: float32 (2, 3)   rank 1: no tensor": target | {"w": 5},
    }
    for text, mine in misfits.items():
        with pytest.raises(DisagreementError) as caught:
            weights.broadcast_state_dict(good if rank == 0 else mine if rank == 1 else target)
        assert text in str(caught.value)
        assert "rank 2" not in str(caught.value)
    refused(
        RemoteError,
        "share memory",
        good if rank == 0 else target | {"x": torch.zeros(1).expand(1), "w": torch.zeros(1, 1).expand(2, 3)},
    )
    refused(
        RemoteError, "and 'b' both 'x'", {"a": good["x"], "b": good["x"]} if rank == 0 else target, rename=lambda _: "x"
    )
    refused(RemoteError, "bucket_bytes=5 is less", good if rank == 0 else target, bucket_bytes=5)
    refused(RemoteError, "to which torch can cast", good if rank == 0 else target, dtype=torch.float4_e2m1fn_x2)
    weights.broadcast_state_dict(good if rank == 0 else target)
    assert target["w"].all() or rank == 0
    mixed = good | {"p": packed_floats(7)}  # travels as it is, whatever the others become
    got = weights.broadcast_state_dict(mixed if rank == 0 else None, dtype=torch.bfloat16)
    assert rank == 0 or [got[name].dtype for name in "wp"] == [torch.bfloat16, torch.float4_e2m1fn_x2]
    assert got["p"].view(torch.uint8).tolist() == [7]


class Damaging(Collectives):
    """A communicator on which one bit of every long message changes."""

    def multicast(self, tensor, root, ranks, async_op):
        work = super().multicast(tensor, root, ranks, async_op)
        if tensor.numel() >= 4000 and tensor.dtype == torch.uint8 and self.get_rank() != root:
            work.wait()
            tensor[3999] ^= 1
        return work


@pytest.mark.slow
@distributed(world_size=2)
def test_damage_is_found_by_digests(rank):
    comm = Damaging(communicators().met().control.backend, "damaging")
    sent = {"fine": torch.ones(7), "hurt": torch.ones(1001), "fine too": torch.ones(70_000, dtype=torch.int8)}
    sent["fine too"] = sent["fine too"][:10]
    with pytest.raises(WireError, match="1 tensors arrived with bytes that differ from those sent\n  hurt  on rank 1"):
        weights.broadcast_state_dict(sent if rank == 0 else {}, verify=True, group=comm)
    got = weights.broadcast_state_dict(sent if rank == 0 else {}, group=comm)
    assert torch.equal(got["hurt"], sent["hurt"]) == (rank == 0)


# --- weights that are sent again and again


@pytest.mark.slow
@distributed(world_size=2)
def test_what_is_known_of_weights_holds_for_those_that_are_like_them_alone(rank):
    """Each pair comes twice, among others: values, ties, dtypes, shapes and faults are those of the call."""

    def tied(fill):
        one = torch.full((3,), fill)
        return {"a": one, "b": one, "c": torch.zeros(2, 2)}

    def apart(fill):
        return {"a": torch.full((3,), fill), "b": torch.full((3,), fill + 1), "c": torch.zeros(2, 2)}

    def both(fill):
        memory = torch.full((6,), fill)
        return {"a": memory[:3], "b": memory[3:], "c": torch.zeros(2, 2).t()}

    for fill in (1.0, 2.0):
        for make in (tied, apart, both):
            for into in (tied, apart, both, None):
                target = {} if into is None else into(0.0)
                if (make, into) == (apart, tied):
                    continue  # which of the two values it gets is not said
                got = weights.broadcast_state_dict(make(fill) if rank == 0 else target)
                assert_same(values(got), values(make(fill)))
                assert rank == 0 or into is not None or (got["a"] is got["b"]) == (make is tied)
        renamed = {"d": torch.full((3,), fill), "e": torch.full((3,), fill), "f": torch.zeros(2, 2)}  # like apart
        assert list(weights.broadcast_state_dict(renamed if rank == 0 else None)) == ["d", "e", "f"]
        half = {"dtype": torch.bfloat16} if rank == 0 else {}
        got = weights.broadcast_state_dict(apart(fill) if rank == 0 else None, **half)
        assert rank == 0 or got["b"].dtype == torch.bfloat16
        memory = torch.zeros(4)
        overlapping = {"a": memory[:3], "b": memory[1:], "c": torch.zeros(2, 2)}  # like those that are apart
        with pytest.raises(RemoteError, match="share memory"):
            weights.broadcast_state_dict(apart(fill) if rank == 0 else overlapping)
        assert not memory.any()
        with torch.inference_mode():
            frozen = apart(0.0)
        if rank == 1:
            with pytest.raises(RemoteError, match="inference tensor"):
                weights.broadcast_state_dict(frozen)
        else:
            with pytest.raises(RemoteError, match="inference tensor"):
                weights.broadcast_state_dict(apart(fill))


def test_only_headers_that_are_not_very_long_are_kept(monkeypatch):
    encoded = bytes(Source({"w": torch.ones(2)}, {"w": "w"}, None, {}).header.numpy())
    assert manifest.manifest(encoded) is manifest.manifest(encoded)
    monkeypatch.setattr(manifest, "LONGEST", len(encoded) - 1)
    assert manifest.manifest(encoded) is not manifest.manifest(encoded)


def test_a_plan_with_a_very_long_header_leaves_nothing(monkeypatch):
    monkeypatch.setattr(source, "_recipes", plans := Recent(4))
    Source({"w": torch.ones(2)}, {"w": "w"}, None, {})
    (kept,) = plans._kept
    monkeypatch.setattr(source, "LONGEST", 1)
    Source({"v": torch.ones(3)}, {"v": "v"}, None, {})
    assert [*plans._kept] == [kept]


def test_receivers_that_do_not_fit_leave_nothing(monkeypatch):
    monkeypatch.setattr(target, "_fits", fits := Recent(4))
    arriving = manifest.manifest(bytes(Source({"w": torch.ones(2)}, {"w": "w"}, None, {}).header.numpy()))
    assert Target({"w": torch.ones(3)}, arriving, Wanted()).misfit()
    unwritable = Target({"w": torch.ones(1).expand(2)}, arriving, Wanted())
    assert not unwritable.misfit()
    with pytest.raises(ValueError, match="expanded"):
        unwritable.allocate()
    assert not fits._kept
    Target({"w": torch.ones(2)}, arriving, Wanted()).allocate()
    assert len(fits._kept) == 1


@distributed(world_size=2)
def test_autograd_hears_of_what_was_written(rank):
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    weights.broadcast_state_dict({"w": weight})
    if rank == 0:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what it costs


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_exchanges_do_not_grow_with_the_number_of_tensors(rank, backend):
    many = {str(i): torch.full((1,), i) for i in range(5000)}
    large = {str(i): torch.full((MiB,), i, dtype=torch.uint8) for i in range(6)}
    with made(backend) as group:
        # a header of more than 32 KiB does not come with the call
        for sent, count in ((many, 2), (large, 6), ({"long": torch.ones(7 * MiB, dtype=torch.uint8)}, 7)):
            target = {name: torch.zeros_like(value) for name, value in sent.items()}
            weights.broadcast_state_dict(sent if rank == 0 else target, bucket_bytes=4 * MiB, group=group)
            assert_same(target if rank else sent, sent)
            with recorded() as operations:
                weights.broadcast_state_dict(sent if rank == 0 else target, bucket_bytes=4 * MiB, group=group)
            kinds = [kind for kind, _ in operations]
            assert (kinds.count("header"), kinds.count("broadcast")) == (2, count)
            assert len(kinds) == 2 + count
        check_works(group, backend)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_memory_is_bounded_by_the_bucket(rank, backend):
    """Strided on both sides and cast on the way, so that nothing can stay where it is: 96 MiB through 8 MiB."""
    sent = {str(i): torch.ones(2048, 2048).t() for i in range(6)}
    target = {str(i): torch.zeros(2048, 2048).t() for i in range(6)}
    options = {"bucket_bytes": 8 * MiB, "dtype": torch.bfloat16}
    with made(backend) as group:
        weights.broadcast_state_dict(sent if rank == 0 else target, group=group, **options)
        easydist.memory.release()
        _, peak = resident.peak_above(
            lambda: weights.broadcast_state_dict(sent if rank == 0 else target, group=group, **options)
        )
        assert all(one.eq(1).all() for one in target.values()) or rank == 0
        assert peak < 3 * 8 * MiB


@pytest.mark.slow
@distributed(world_size=(1, 2))
def test_a_short_call_shows_no_bar(rank, world_size):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        got = weights.broadcast_state_dict(nn.Linear(2, 1) if rank == 0 else None, progress=True)
    assert list(got) == ["weight", "bias"]
    assert shown.getvalue() == ""


@pytest.mark.slow
@distributed(world_size=2)
def test_a_bar_that_cannot_be_shown_is_an_error_before_the_others_wait(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tqdm", None)
        with pytest.raises((RemoteError, ImportError), match="tqdm"):
            weights.broadcast_state_dict(nn.Linear(2, 1), progress=rank == 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xxhash", None)
        with pytest.raises((RemoteError, ImportError), match=r"verify=True needs xxhash"):
            weights.broadcast_state_dict(nn.Linear(2, 1), verify=True)
    assert len(weights.broadcast_state_dict(nn.Linear(2, 1), verify=True)) == 2


ERRORS = [PeerLostError, CollectiveTimeout, RemoteError, DisagreementError, WireError, ValueError]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_go_to_the_process_that_started_this_one(error):
    one = shared(communicators(None), error("text"))
    one.rank = 3
    copy = pickle.loads(pickle.dumps(one))
    assert (type(copy), str(copy), copy.rank, copy.raised_in) == (error, "text", 3, None)
