"""Collectives of several rounds, and their schedules, on thousands of ranks in one process: a simulated network."""

import collections
import functools
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from groups import many
from launching import IS_STRESS, sampled

from easydist.comms import Gloo, ReduceOp
from easydist.data.arithmetic import split_sizes
from easydist.testing import default_pool, distributed
from easydist.testing.cases import MOVED, drawing
from easydist.testing.conformance import run_battery
from easydist.transport import rounds, schedules
from easydist.transport.comm import Collectives

SIZES = [*range(1, 65), 1000, 1023, 4096, 10_000]
SMALL = [size for size in SIZES if size <= 64]
PLAYED = SIZES if IS_STRESS else [*SMALL, 1023]
"""The sizes with which every rank's tensors are played."""


def each_size(sizes):
    """Run the test for each of these numbers of ranks, as one test."""

    def decorate(test):
        @functools.wraps(test)
        def body():
            for size in sizes:
                try:
                    test(size)
                except AssertionError as error:
                    raise AssertionError(f"with {size} ranks") from error

        del body.__wrapped__  # pytest would look for a fixture called size
        return pytest.mark.slow(body)

    return decorate


def depth(size):
    return (size - 1).bit_length()


class Message:
    """One side of a message; it has arrived once it has met the other side."""

    def __init__(self, tensor):
        self.tensor, self.has_arrived = tensor, False


class Network:
    """A network whose ranks run until each of them waits; it counts what each has sent.

    A message is read as late as possible: when both sides wait for it, or have it behind them.

    Args:
        size: The number of ranks.
        seed: The order in which the ranks run.
    """

    def __init__(self, size, seed=0):
        self.size, self._random = size, random.Random(seed)
        self.messages, self.nbytes, self.rounds = ([0] * size for _ in range(3))
        self._sent, self._awaited = (collections.defaultdict(collections.deque) for _ in range(2))

    def exchange_of(self, rank):
        def exchange(sends, recvs):
            self.rounds[rank] += 1
            self.messages[rank] += len(sends)
            self.nbytes[rank] += sum(tensor.nbytes for tensor, _ in sends)
            begun = []
            for way, pairs in (
                (self._sent, [((rank, peer), one) for one, peer in sends]),
                (self._awaited, [((peer, rank), one) for one, peer in recvs]),
            ):
                for pair, tensor in pairs:
                    way[pair].append(message := Message(tensor))
                    begun.append((pair, message))
            return begun

        return exchange

    def _has_arrived(self, pair, message):
        while not message.has_arrived and self._sent[pair] and self._awaited[pair]:
            sent, awaited = self._sent[pair].popleft(), self._awaited[pair].popleft()
            assert sent.tensor.nbytes <= awaited.tensor.nbytes, "gloo would end the process"
            awaited.tensor[: len(sent.tensor)] = sent.tensor
            sent.has_arrived = awaited.has_arrived = True
        return message.has_arrived

    def run(self, collective, absent=()):
        """Run ``collective(exchange, rank)`` on all ranks; return the ranks that have come to its end."""
        running = {rank: collective(self.exchange_of(rank), rank) for rank in range(self.size) if rank not in absent}
        waiting = {rank: next(one, None) for rank, one in running.items()}
        ended, moves = {rank for rank, part in waiting.items() if part is None}, True
        while moves and len(ended) < len(running):
            ranks = [rank for rank in running if rank not in ended]
            self._random.shuffle(ranks)
            moves = False
            for rank in ranks:
                while (part := waiting[rank]) is not None and self._has_arrived(*part):
                    waiting[rank], moves = next(running[rank], None), True
                if part is None:
                    ended.add(rank)
        return ended


def sample(rank, numel):
    return torch.arange(numel) * 1000 + rank


@each_size(SIZES)
def test_in_doubling_each_rank_gets_every_block_once_in_a_logarithm_of_rounds(size):
    every = [schedules.doubling(rank, size) for rank in range(size)]
    for rank, mine in enumerate(every):
        assert len(mine) == depth(size)
        assert [one.held for one in mine] == [*itertools.accumulate((one.blocks for one in mine[:-1]), initial=1)][
            : len(mine)
        ]
        assert 1 + sum(one.blocks for one in mine) == size
        for k, one in enumerate(mine):
            its = every[one.src][k]
            # It sends its first blocks, which are those after mine.
            assert (its.dst, its.blocks, one.src) == (rank, one.blocks, (rank + one.held) % size)
            assert its.blocks <= its.held
        assert len({one.dst for one in mine}) == len(mine)


@each_size(SIZES)
def test_a_tree_reaches_each_rank_once_in_a_logarithm_of_steps(size):
    edges = {place: schedules.tree(place, size) for place in range(size)}
    distance, reached = {0: 0}, [0]
    for place in reached:
        children = edges[place][1]
        assert len(children) <= depth(size)
        for child in children:
            assert edges[child][0] == place
            assert child not in distance
            distance[child] = distance[place] + 1
            reached.append(child)
    assert len(reached) == size
    assert edges[0][0] is None
    assert max(distance.values()) <= depth(size)


@each_size([*SMALL, 1023] if IS_STRESS else [*SMALL, 200])
def test_gather_blocks(size):
    lengths = [(3 * rank + size) % 4 for rank in range(size)]  # some are empty
    outputs = [[torch.empty(numel, dtype=torch.int64) for numel in lengths] for _ in range(size)]
    network = Network(size, seed=size)
    ended = network.run(
        lambda exchange, rank: rounds.gather_blocks(exchange, rank, outputs[rank], sample(rank, lengths[rank]))
    )
    assert ended == {*range(size)}
    want = torch.cat([sample(rank, numel) for rank, numel in enumerate(lengths)])
    assert all(torch.equal(torch.cat(got), want) for got in outputs)
    assert network.rounds == [depth(size)] * size
    assert max(network.nbytes) <= 8 * max(lengths) * (size - 1)


@each_size([*SMALL, 257, *([1000, 1023] if IS_STRESS else [])])
def test_gather_frames_of_lengths_that_only_their_senders_know(size):
    lengths = [(7 * rank + size) % 12 for rank in range(size)]
    rows = [torch.full((size, 11), 255, dtype=torch.uint8) for _ in range(size)]
    frames = [(sample(rank, numel) % 251).to(torch.uint8) for rank, numel in enumerate(lengths)]
    for rank, frame in enumerate(frames):
        rows[rank][rank, : len(frame)] = frame
    network = Network(size, seed=size)
    assert len(network.run(lambda ex, rank: rounds.gather_frames(ex, rank, rows[rank], lengths[rank]))) == size
    for row, (rank, frame) in itertools.product(rows, enumerate(frames)):
        assert torch.equal(row[rank, : len(frame)], frame)
    assert network.messages == [depth(size)] * size
    assert max(network.nbytes) <= (8 + max(lengths)) * (size - 1)


@each_size(PLAYED)
def test_fold(size):
    tensors = [torch.tensor([rank, -rank, rank * 7919 % size]) for rank in range(size)]
    network = Network(size, seed=size)
    ended = network.run(lambda ex, rank: rounds.fold(ex, rank, size, tensors[rank], ReduceOp.MAX))
    assert len(ended) == size
    want = [size - 1, 0, max(rank * 7919 % size for rank in range(size))]
    assert all(got.tolist() == want for got in tensors)
    assert (network.messages, network.nbytes) == ([depth(size)] * size, [24 * depth(size)] * size)


@each_size(PLAYED)
def test_meet(size):
    network = Network(size, seed=size)
    assert len(network.run(lambda exchange, rank: rounds.meet(exchange, rank, size))) == size
    assert network.messages == [depth(size)] * size


@each_size([*SMALL[1:], 1023])
def test_nobody_leaves_a_meeting_before_all_have_come(size):
    absent = size * 5 // 7
    assert not Network(size, seed=size).run(lambda exchange, rank: rounds.meet(exchange, rank, size), {absent})


def spread_from(root, tensors, exchange, rank):
    size = len(tensors)
    parent, children = schedules.tree((rank - root) % size, size)
    above = [] if parent is None else [(tensors[rank], (parent + root) % size)]
    return rounds.spread(exchange, above, [(tensors[rank], (child + root) % size) for child in children])


@each_size(PLAYED)
def test_spread(size):
    for root in {0, size // 3, size - 1}:
        tensors = [torch.tensor([rank, 7]) for rank in range(size)]
        network = Network(size, seed=size)
        run = functools.partial(spread_from, root, tensors)
        assert len(network.run(run)) == size
        assert all(got.tolist() == [root, 7] for got in tensors)
        assert sum(network.messages) == size - 1
        assert max(network.messages) == network.messages[root] == depth(size)


def scatter_from(root, chunks, exchange, rank):
    return rounds.scatter_and_share(exchange, rank, root, chunks[rank])


@each_size([*(SMALL[1:] if IS_STRESS else range(2, 18)), 31, 32, 33, 64, *([200] if IS_STRESS else [])])
def test_scatter_and_share(size):
    numel = 3 * size + 1
    for root in {0, size // 2, size - 1}:
        tensors = [sample(rank, numel) for rank in range(size)]
        chunks = [tensor.split(split_sizes(numel, size)) for tensor in tensors]
        network = Network(size, seed=size)
        run = functools.partial(scatter_from, root, chunks)
        assert len(network.run(run)) == size
        assert all(torch.equal(got, sample(root, numel)) for got in tensors)
        assert max(network.nbytes) == network.nbytes[root] <= 2 * 8 * (numel + size)


def over_gloo(rank, world_size):
    return Collectives(Gloo(dist.group.WORLD, torch.device("cpu"), "gloo"))


def run_battery_as_many(rank, world_size):
    with many(), drawing(*(MOVED if IS_STRESS else MOVED[::4])):
        run_battery(over_gloo, rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sampled([3, 5, 2], 3))
def test_battery(world_size):
    default_pool().run(run_battery_as_many, world_size)


@distributed(world_size=3)
def test_sums_have_the_same_bits_whichever_schedule_is_chosen(rank):
    comm = over_gloo(rank, 3)
    for dtype, numel in itertools.product([torch.float32, torch.bfloat16], [1, 1000, 30_000]):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        straight, doubled = values.clone(), values.clone()
        comm.all_reduce(straight, ReduceOp.SUM, async_op=False)
        with many():
            comm.all_reduce(doubled, ReduceOp.SUM, async_op=False)
        assert torch.equal(straight.view(torch.uint8), doubled.view(torch.uint8))
