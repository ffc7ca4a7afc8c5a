"""From one rank to another one, and from one to all: tensors, objects, tensor dicts."""

import dataclasses
import enum
import itertools
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import trees
from coordinators import made, text_of
from groups import of_all
from launching import within
from trees import CASES, OUTSIDERS, assert_same

import easydist
from easydist.testing import distributed

LARGE = 70_000
CLASSES = [trees.Color, trees.Level, trees.Point, trees.Batch, trees.Frozen, trees.Slotted, trees.FrozenSlotted,
           trees.Pair, trees.Items, trees.Registry]  # fmt: skip
LOST = {"object", "class", "function", "statics", "registered", "odd keys", "namedtuple with its own __new__",
        "dataclass with init=False", "frozen mapping", "mapping proxy", "deep", "dict subclass",
        "field of a record"}  # fmt: skip
"""Values that restricted decoding refuses, or that are of no interest here."""

NAMES = [name for name in CASES if name not in LOST | OUTSIDERS.keys()]


def everything():
    """Awkward trees, small and large, in one."""
    large = torch.arange(LARGE * 4, dtype=torch.int32)
    return {
        **{name: CASES[name]() for name in NAMES},
        "large": large,
        "columns": large.view(-1, 4).t(),
        "half": large[::2],
    }


def check_tree(got, want):
    for name, value in want.items():
        like = value if not isinstance(value, torch.Tensor) else value.detach()
        one = got[name].detach() if isinstance(got[name], torch.Tensor) else got[name]
        if isinstance(like, torch.Tensor):
            assert (got[name].requires_grad, type(got[name])) == (value.requires_grad, type(value)), name
            assert got[name].is_contiguous()
            like = like.resolve_conj().resolve_neg()
            assert_same(torch.as_tensor(one), torch.as_tensor(like))
        elif name.startswith("array >"):
            assert one.tolist() == value.tolist()
        else:
            assert_same(one, like)


@pytest.mark.slow
@distributed(world_size=(1, 2, 3, 4))
def test_every_awkward_tree_arrives_as_it_is(rank, world_size):
    with torch.serialization.safe_globals(CLASSES), made(rank, world_size) as group:
        data = everything()
        for src in {0, world_size - 1}:
            got = group.broadcast_tensor_dict(data if rank == src else None, src)
            if rank == src:
                assert got is data
            else:
                check_tree(got, data)
        if world_size == 1:
            assert group.send_tensor_dict(data) is data
            assert group.recv_tensor_dict() is None
            return
        for step in range(2):  # once round: the even ranks send first
            if (rank + step) % 2 == 0 and rank + 1 < world_size:
                group.send_tensor_dict(data)
            elif (rank + step) % 2 and rank:
                check_tree(group.recv_tensor_dict(), data)
        for name in ("0-dim", "namedtuple", "enum", "tied", "empty list", "None"):
            if rank == 0:
                group.send_tensor_dict(CASES[name](), world_size - 1)
            elif rank == world_size - 1:
                assert_same(group.recv_tensor_dict(0), CASES[name]())


@distributed(world_size=2)
def test_tensors_and_objects_from_rank_to_rank(rank):
    sent = [
        torch.tensor(3.5),
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 3),
        torch.arange(LARGE * 2.0),
        torch.ones(9)[::2],
    ]
    sent += [torch.ones(4).to(dtype) for dtype in trees.DTYPES]
    objects = [{"a": [1, None]}, "x" * 100_000, torch.ones(LARGE), [torch.float32, {1, 2}], None]
    with made(rank, 2) as group:
        for tensor in sent:
            if rank == 0:
                group.send(tensor)
            else:
                assert_same(group.recv(tensor.shape, tensor.dtype), tensor.contiguous())
        for obj in objects:
            if rank == 1:
                group.send_object(obj, 0)
            else:
                assert_same(group.recv_object(1), obj)
        if rank == 0:
            group.send(torch.arange(6))
            group.send(torch.arange(6))
            assert group.isend_tensor_dict({"a": 1})[0].is_completed() in (True, False)
        else:
            assert group.recv(torch.Size([2, 3]), torch.int64).tolist() == [[0, 1, 2], [3, 4, 5]]
            assert group.recv(6, torch.int64).tolist() == [*range(6)]
            assert group.recv_tensor_dict() == {"a": 1}


@distributed(world_size=2)
def test_a_trace_has_one_record_of_each_message(rank):
    with made(rank, 2) as group:
        with easydist.trace() as trace:
            if rank == 0:
                group.send_tensor_dict({"x": torch.ones(LARGE)})
                group.send_object("x", 1)
            else:
                group.recv_tensor_dict()
                group.recv_object(0)
        way = ["send", "recv"][rank]
        assert [(call.operation, call.peer) for call in trace.calls] == [
            (f"{way}_tensor_dict", 1 - rank),
            (f"{way}_object", 1 - rank),
        ]


class Unknown(enum.Enum):
    A = 1


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Step:
    x: torch.Tensor
    kind: Unknown


@distributed(world_size=2)
def test_classes_are_refused_alike_until_they_are_allowed(rank):
    with made(rank, 2) as group, made(rank, 2, weights_only=False) as trusting:
        data = {"step": Step(torch.ones(2), Unknown.A), "pair": Pair(1, torch.zeros(1))}

        def pair(of):
            return of.recv_tensor_dict() if rank else of.send_tensor_dict(data)

        for call in (lambda: pair(group), lambda: group.broadcast_tensor_dict(data)):
            found = text_of(call)
            assert "Step" in found or "Pair" in found or "Unknown" in found
            assert found.startswith("RemoteError")
            assert len(set(of_all(found))) == 1
        for got in (pair(trusting), trusting.broadcast_tensor_dict(data)):
            assert got is None or (got["step"].kind, type(got["pair"]), got["step"].x.tolist()) == (
                Unknown.A,
                Pair,
                [1, 1],
            )
        torch.serialization.add_safe_globals([Step, Unknown, Pair] if rank == 0 else [])
        found = text_of(lambda: pair(group))  # the receiver alone does not know them
        assert found.startswith("RemoteError: recv_tensor_dict: rank 1 cannot take what rank 0 sends")
        assert len(set(of_all(found))) == 1
        assert text_of(lambda: group.broadcast_tensor_dict(data)).startswith("RemoteError")
        with torch.serialization.safe_globals([Step, Unknown, Pair]):
            for got in (pair(group), group.broadcast_tensor_dict(data)):
                assert got is None or (got["step"].kind, type(got["pair"])) == (Unknown.A, Pair)
        torch.serialization.clear_safe_globals()


def unlike(group, rank):
    """Calls of two ranks that do not fit together, and how the error begins."""
    tree = {"x": torch.arange(8.0), "y": torch.ones(LARGE * 2)}
    send, recv = group.send_tensor_dict, group.recv_tensor_dict
    return {
        "recv_tensor_dict: rank 0 called send, rank 1 called recv_tensor_dict": (lambda: group.send(tree["y"]), recv),
        "recv: rank 0 called send_tensor_dict, rank 1 called recv": (
            lambda: send(tree),
            lambda: group.recv(torch.Size([8]), torch.float32),
        ),
        "recv_object: rank 0 called send_tensor_dict": (lambda: send(tree), lambda: group.recv_object(0)),
        "recv: rank 0 sends torch.float32 (8,), but rank 1 expects torch.float32 (9,)": (
            lambda: group.send(tree["x"]),
            lambda: group.recv(torch.Size([9]), torch.float32),
        ),
        "recv: rank 0 sends torch.float32 (140000,), but rank 1 expects torch.int32 (140000,)": (
            lambda: group.send(tree["y"]),
            lambda: group.recv(torch.Size([LARGE * 2]), torch.int32),
        ),
        "send_tensor_dict: rank 0 failed before the exchange": (lambda: send({"f": text_of}), recv),
        "send: rank 0 failed before the exchange\n  rank 0: TypeError: send: got list, not a tensor": (
            lambda: group.send([1.0]),
            lambda: group.recv(torch.Size([1]), torch.float32),
        ),
        "recv: rank 1 cannot take what rank 0 sends\n  rank 1: TypeError: recv: size='size' is not a shape": (
            lambda: group.send(tree["y"]),
            lambda: group.recv("size", torch.float32),
        ),
        "send_object: rank 0 failed before the exchange": (
            lambda: group.send_object(text_of, 1),
            lambda: group.recv_object(0),
        ),
        "recv_tensor_dict: the two ranks disagree on the all-gather": (
            lambda: send(tree, all_gather_group=group),
            recv,
        ),
        "recv_tensor_dict: the two ranks disagree on the all-gather\n  rank 0 sends with no": (
            lambda: send(tree),
            lambda: recv(all_gather_group=group),
        ),
        "recv_tensor_dict: the two ranks disagree on the all-gather\n  rank 0 sends with an all_gather_group of 2": (
            lambda: send(tree, all_gather_group=group, all_gather_tensors={"x": True}),
            lambda: recv(all_gather_group=group),
        ),
        "send_tensor_dict: rank 0 failed before the exchange\n  rank 0: TypeError: all_gather_group has to be": (
            lambda: send(tree, all_gather_group=group.cpu_group),
            recv,
        ),
        "recv_tensor_dict: rank 1 cannot take what rank 0 sends\n  rank 1: TypeError: all_gather_tensors has to be": (
            lambda: send(tree),
            lambda: recv(all_gather_tensors=["x"]),
        ),
    }


@distributed(world_size=2)
def test_two_that_mean_different_things_get_the_same_error_and_go_on(rank):
    with made(rank, 2) as group:
        for begin, calls in unlike(group, rank).items():
            found = text_of(calls[rank])
            assert found.split(": ", 1)[1].startswith(begin), found
            assert len(set(of_all(found))) == 1, begin
            if rank == 0:
                group.send_tensor_dict({"x": begin})
            else:
                assert group.recv_tensor_dict() == {"x": begin}
        for dst in (-1, 2, rank):
            assert text_of(lambda dst=dst: group.send(torch.ones(1), dst)).startswith(
                f"ValueError: send: dst={dst} is not another rank of the group"
            )
            assert "recv_object: src=" in text_of(lambda dst=dst: group.recv_object(dst))


@pytest.mark.slow
@distributed(world_size=4)
def test_shares_of_a_tensor_are_sent_and_gathered(rank):
    tp_lists, pp_lists = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    x, y = torch.arange(24.0).view(4, 6), torch.arange(LARGE * 4, dtype=torch.int64)
    data = {
        "x": x,
        "t": x.t(),
        "y": y,
        "odd": torch.ones(3),
        "own": torch.full((2,), rank % 2),
        "n": {"z": x},
        "tie": x,
    }
    asked = {"x": True, "t": True, "y": True, "odd": True, "['n']['z']": True, "tie": True}
    with made(rank, 4, tp_lists) as tp, made(rank, 4, pp_lists) as pp:
        flat = {name: value for name, value in data.items() if name != "n"}
        for terms, sent in itertools.product(({}, asked), (data, flat)):
            if rank < 2:
                pp.send_tensor_dict(sent, all_gather_group=tp, all_gather_tensors=terms)
                handle, _ = pp.isend_tensor_dict(sent, all_gather_group=tp, all_gather_tensors=terms)
                handle.wait()
                continue
            got = pp.recv_tensor_dict(all_gather_group=tp, all_gather_tensors=terms)
            later, handles, after = pp.irecv_tensor_dict(all_gather_group=tp, all_gather_tensors=terms)
            for handle in handles:
                handle.wait()
            for finish in after:
                finish()
            for one in (got, later):
                assert_same(one, {**sent, "t": x.t().contiguous(), "own": torch.full((2,), rank % 2)})
                assert one["tie"] is one["x"]


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "asked"), [("0000", {"x": True}), ("0011", {})])
@distributed(world_size=4, timeout=within(20))
def test_a_rank_that_gets_no_share_is_not_waited_for(rank, hosts, asked):
    data = {"x": torch.arange(4.0), "f": text_of if rank == 0 else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {hosts[rank]}")
        with made(rank, 4, [[0, 1], [2, 3]]) as tp, made(rank, 4, [[0, 2], [1, 3]]) as pp:
            options = {"all_gather_group": tp, "all_gather_tensors": asked}
            found = text_of(
                lambda: pp.send_tensor_dict(data, **options) if rank < 2 else pp.recv_tensor_dict(**options)
            )
            assert ["send_tensor_dict: rank 0 failed" in text for text in of_all(found)] == [True, False, True, True]
            assert of_all(found.partition(":")[0]) == ["RemoteError", "a result", "RemoteError", "RemoteError"]
            assert tp.all_reduce(torch.ones(1)).item() == pp.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.slow
@distributed(world_size=4)
def test_between_hosts_tensors_go_in_shares_unless_that_is_forbidden(rank):
    data = {"x": torch.arange(24.0), "own": torch.full((2,), rank % 2), "odd": torch.ones(3)}
    terms = {"own": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {rank // 2}")
        with made(rank, 4, [[0, 1], [2, 3]]) as tp, made(rank, 4, [[0, 2], [1, 3]]) as pp:
            if rank < 2:
                pp.send_tensor_dict(data, all_gather_group=tp, all_gather_tensors=terms)
                return
            got, handles, after = pp.irecv_tensor_dict(all_gather_group=tp, all_gather_tensors=terms)
            assert (len(handles), len(after)) == (0, 1)  # the shares have come; they have to be gathered
            after[0]()
            assert_same(got, data)


@distributed(world_size=3)
def test_group_and_metadata_group_carry_what_they_are_given(rank):
    with made(rank, 3) as group:
        other = dist.new_group([0, 1, 2])
        part = dist.new_group([1, 2])
        large = {"x": torch.full((LARGE,), rank), "s": rank}
        before = easydist.ProcessState().communicators(other).monitor.number
        for groups in (
            {"group": other},
            {"metadata_group": other},
            {"group": other, "metadata_group": group.cpu_group},
        ):
            got = group.broadcast_tensor_dict(large, 2, **groups)
            assert (got["s"], got["x"][0]) == (2, 2)
            after = easydist.ProcessState().communicators(other).monitor.number
            assert after > before
            before = after
        if rank:
            got = group.broadcast_tensor_dict(large, 1, group=part)
            assert (got["s"], got["x"][0]) == (2, 2)
            assert group.broadcast_object_list([rank, None], 1, part) == [2, None]
        assert group.broadcast_object_list([rank, "a"], 2) == [2, "a"]
        found = text_of(lambda: group.broadcast_tensor_dict(large, 0, group=part, metadata_group=other)) if rank else ""
        assert found.startswith("ValueError: broadcast_tensor_dict: group has 2 ranks") == bool(rank)


@distributed(world_size=3)
def test_objects_come_from_any_source_with_queues_and_without(rank):
    with made(rank, 3, use_message_queue_broadcaster=True) as queued, made(rank, 3) as plain:
        for group in (queued, plain):
            for src in (0, 2, 1, 2, 0):
                obj = {"src": src, "x": torch.full((5,), src)}
                assert_same(group.broadcast_object(obj if rank == src else None, src), obj)
        assert queued.mq_broadcaster.is_writer == (rank == 0)
        assert plain.mq_broadcaster is None
        assert "src=5 is not a rank" in text_of(lambda: queued.broadcast_object(1, 5))
        with plain.create_mq_broadcaster(1) as queue:
            assert queue.broadcast_object("x" if rank == 1 else None) == "x"
            plain.barrier()
        queue, handles = plain.create_single_reader_mq_broadcasters(2)
        assert len(handles) == (3 if rank == 2 else 0)
        readers = [easydist.queue.MessageQueue.create_from_handle(handle, 0) for handle in handles]
        queue.enqueue(rank)
        assert [reader.dequeue(within(10)) for reader in readers] == [0, 1, 2][: len(readers)]
        plain.barrier()
        for end in [queue, *readers]:
            end.close()


@pytest.mark.slow
@distributed(world_size=(2, 3))
def test_many_messages_of_many_lengths_keep_their_order(rank, world_size):
    with made(rank, world_size) as group:
        for step in range(300):
            data = {"step": step, "x": torch.arange(step * 97 % 40_000)}
            if rank == 0:
                group.isend_tensor_dict(data, world_size - 1)
                if step % 7 == 0:
                    assert group.recv_object(world_size - 1) == step
            elif rank == world_size - 1:
                got = group.recv_tensor_dict(0)
                assert got["step"] == step
                assert torch.equal(got["x"], data["x"])
                if step % 7 == 0:
                    group.send_object(step, 0)


@distributed(world_size=3)
def test_the_neighbours_of_three_ranks(rank, world_size):
    with made(rank, world_size) as group:
        after, before = (rank + 1) % 3, (rank - 1) % 3
        assert (group.next_rank, group.prev_rank) == (after, before)
        for turn in range(3):  # one sends to the next rank, and that one receives from the previous one
            if rank == turn:
                group.send(torch.tensor([rank]))
            if before == turn:
                assert group.recv(torch.Size([1]), torch.int64).tolist() == [before]
        easydist.wait_for_everyone()
