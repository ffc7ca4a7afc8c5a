"""The arithmetic of blocks and the schedule of messages: pure, so by property."""

import math
import operator
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from launching import examples
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from easydist.verbs.buckets import LARGE
from easydist.weights.blocks import Block, Delivery, apart, common, cut, deliveries, is_covered, shard, whole
from easydist.weights.schedule import SHARES, ScheduledEntry, schedule

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def elements(block, shape):
    """The flat indices of a block's elements: the oracle."""
    return set(block.of(torch.arange(math.prod(shape)).view(shape)).flatten().tolist())


@settings(max_examples=examples(40))
@given(SHAPES, st.integers(1, 40))
def test_cutting_keeps_every_element_once_and_in_order(shape, numel):
    whole_tensor = torch.arange(math.prod(shape)).view(shape)
    parts = [part.of(whole_tensor) for part in cut(whole(shape), numel)]
    assert torch.cat([part.reshape(-1) for part in parts]).equal(whole_tensor.view(-1))
    assert all(part.is_contiguous() and part.numel() <= numel for part in parts)


@st.composite
def blocks(draw, shape):
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return Block(start, tuple(draw(st.integers(0, size - first)) for first, size in zip(start, shape, strict=True)))


@settings(max_examples=examples(40))
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), blocks(shape), blocks(shape))))
def test_what_two_blocks_share(case):
    shape, one, other = case
    both = elements(one, shape) & elements(other, shape)
    found = common(one, other)
    assert (elements(found, shape) if found else set()) == both
    if found:
        tensor = torch.arange(math.prod(shape)).view(shape)
        assert found.within(one).of(one.of(tensor)).equal(found.of(tensor))


@settings(max_examples=examples(40))
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(blocks(shape), max_size=4))))
def test_each_element_of_overlapping_blocks_is_that_of_the_first(case):
    shape, held = case
    before, found = set(), apart([*enumerate(held)])
    for rank, block in enumerate(held):
        mine = [element for one, part in found if one == rank for element in elements(part, shape)]
        assert sorted(mine) == sorted(elements(block, shape) - before)
        before |= elements(block, shape)


@st.composite
def layouts(draw):
    """A shape, a mesh, and a placement for each of its dimensions."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    dims = st.integers(-len(shape), len(shape) - 1).map(Shard)
    return shape, mesh, [draw(st.just(Replicate()) | dims) for _ in mesh]


@settings(max_examples=examples(40))
@example(((5,), (4,), [Shard(0)]))  # the last shard is empty
@given(layouts())
def test_shards_are_those_of_chunk(layout):
    shape, mesh, placements = layout
    tensor = torch.arange(math.prod(shape)).view(shape)
    held = {}
    for place in product(*map(range, mesh)):
        want = tensor
        for size, at, placement in zip(mesh, place, placements, strict=True):
            if isinstance(placement, Shard):
                chunks = [*want.chunk(size, placement.dim)]
                want = chunks[at] if at < len(chunks) else want.narrow(placement.dim, 0, 0)
        block = shard(shape, mesh, place, placements)
        assert block.of(tensor).equal(want)
        assert all(first <= length for first, length in zip(block.start, shape, strict=True))
        held[block] = place
    full = [block for block in held if block.numel]
    assert is_covered(shape, full) or not math.prod(shape)


def test_fsdp_over_tensor_parallel_cuts_the_tensor_parallel_shards():
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    found = {place: shard((8,), (2, 2), place, placements).start for place in product((0, 1), (0, 1))}
    assert found == {(0, 0): (0,), (1, 0): (2,), (0, 1): (4,), (1, 1): (6,)}


def test_values_that_need_a_reduction_are_refused():
    with pytest.raises(TypeError, match=r"redistribute\(\) it first"):
        shard((4,), (2,), (0,), [Partial()])


def test_holes_and_overlaps_are_found():
    assert not is_covered((4,), [Block((0,), (3,))])
    assert not is_covered((4,), [Block((0,), (2,)), Block((1,), (2,))])


ITEMS = st.lists(
    st.tuples(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]), st.integers(0, 6000)),
    max_size=12,
)


@pytest.mark.slow
@given(ITEMS, st.integers(12, 18), st.booleans(), st.booleans())
def test_a_schedule_moves_every_byte_once_in_bounded_messages(sizes, bits, halves, in_order):
    """``halves``: two ranks hold one half of each entry."""
    items = []
    for dtype, n in sorted(sizes, key=lambda pair: -pair[0].itemsize):
        parts = [Delivery(0, (2,), Block((0,), (n // 2,))), Delivery(1, (2,), Block((n // 2,), (n - n // 2,)))]
        parts = parts if halves else [Delivery(0, (2,), whole((n,)))]
        items.append(ScheduledEntry(dtype, "cpu", parts))
    messages = schedule(items, 1 << bits, in_order)
    limit = (1 << bits) // SHARES
    assert all(0 < message.nbytes <= limit for message in messages)
    moved = [[] for _ in items]
    for message in messages:
        assert message.nbytes == sum(part.nbytes for part in message.parts)
        item_sizes = [items[part.entry].dtype.itemsize for part in message.parts]
        assert item_sizes == sorted(item_sizes, reverse=True)
        for part in message.parts:
            (one,) = [one for one in items[part.entry].blocks if common(one.block, part.block) == part.block]
            assert one[:2] == message[:2]
            moved[part.entry].append(part.block)
    for item, found in zip(items, moved, strict=True):
        end = 0
        for block in sorted(found):
            assert block.start == (end,)
            end += block.numel
        assert end == sum(one.block.numel for one in item.blocks)


@st.composite
def transfers(draw):
    """A shape, the blocks that ranks 0 to 2 hold, and those that some of the ranks 2 to 5 want."""
    shape = draw(SHAPES)
    bounds = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    starts, stops = product(*(cuts[:-1] for cuts in bounds)), product(*(cuts[1:] for cuts in bounds))
    cells = [Block(a, tuple(map(operator.sub, b, a))) for a, b in zip(starts, stops, strict=True)]
    holders = st.lists(st.integers(0, 2), min_size=1, max_size=2)
    held = tuple([(rank, cell) for cell in cells for rank in draw(holders)])
    some = st.tuples(*(st.tuples(*[st.sampled_from(cuts)] * 2).map(sorted) for cuts in bounds))
    of_cells = some.map(lambda ends: Block(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    wanted = {rank: draw(of_cells | blocks(shape)) for rank in draw(st.sets(st.integers(2, 5)))}
    return shape, held, tuple(wanted.items())


FIRST, SECOND = Block((0,), (2,)), Block((2,), (2,))
BESIDE = (4,), ((0, FIRST), (1, SECOND)), ((2, whole((4,))), (3, FIRST))
"""A receiver of all beside one of a half, which is all that its source has."""


@pytest.mark.slow
@example([BESIDE], 9, False)
@given(st.lists(transfers(), max_size=4), st.integers(4, 9), st.booleans())
def test_each_rank_gets_what_it_wants_once_and_nothing_else(cases, bits, in_order):
    items = [ScheduledEntry(torch.float32, "cpu", deliveries(*case)) for case in cases]
    packets = schedule(items, 1 << bits, in_order)
    for entry, (shape, held, wanted) in enumerate(cases):
        moved = [(packet, part.block) for packet in packets for part in packet.parts if part.entry == entry]
        for rank in range(6):
            got = [i for packet, block in moved if rank in packet.ranks for i in elements(block, shape)]
            assert sorted(got) == sorted(elements(dict(wanted)[rank], shape) if rank in dict(wanted) else [])
        for packet, block in moved:
            assert packet.ranks
            assert any(rank == packet.root and common(block, cell) == block for rank, cell in held)
    assert all(packet.nbytes <= max(4, (1 << bits) // SHARES) for packet in packets)


def test_a_block_of_several_sources_must_be_whole():
    with pytest.raises(ValueError, match=r"the blocks of ranks \[0, 1\] do not make up a tensor of shape \(4,\)"):
        deliveries((4,), ((0, Block((0,), (2,))), (1, Block((2,), (1,)))), ((2, whole((4,))),))


def test_a_large_tensor_travels_alone_and_a_small_one_beside_others():
    items = [ScheduledEntry(torch.uint8, "cpu", [Delivery(0, (1,), whole((n,)))]) for n in (LARGE, LARGE - 1, 1)]
    assert [[part.entry for part in one.parts] for one in schedule(items, 64 << 20)] == [[0], [1, 2]]


def test_in_order_few_entries_lack_a_part():
    """The second source has a hundredth of each entry, so its packets are full a hundred times less often."""
    blocks = [Delivery(0, (2,), Block((0,), (1000,))), Delivery(1, (2,), Block((1000,), (10,)))]
    items = [ScheduledEntry(torch.uint8, "cpu", blocks) for _ in range(1000)]
    begun, most = set(), 0
    for packet in schedule(items, 40_000, in_order=True):
        begun ^= {part.entry for part in packet.parts}  # those of which one of two parts has come
        most = max(most, len(begun))
    assert most == 10
    assert not begun


def test_packets_wait_for_their_own_receivers_alone():
    """Rank 0 has so much for rank 1 that its packets fill, and little for each of many others."""
    blocks = [Delivery(0, (1,), Block((0,), (1000,)))]
    blocks += [Delivery(0, (rank,), Block((1000 + 2 * rank,), (2,))) for rank in range(2, 50)]
    packets = schedule([ScheduledEntry(torch.uint8, "cpu", blocks)] * 100, 40_000, in_order=True)
    assert sorted(packet.nbytes for packet in packets) == [200] * 48 + [10_000] * 10


def test_thousands_of_small_tensors_are_one_message():
    items = [ScheduledEntry(torch.float32, "cpu", [Delivery(0, (1,), whole((1,)))]) for _ in range(5000)]
    (message,) = schedule(items, 64 << 20)
    assert message.nbytes == 20_000
