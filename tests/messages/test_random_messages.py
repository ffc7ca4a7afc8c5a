"""Random messages of two ranks in both directions: sent and posted, received at once and later, and refused.

``EASYDIST_STRESS=20000 pytest tests/messages/test_random_messages.py`` plays more schedules; each has its number as its
seed.
"""

import random

import launching
import pytest
import torch

from easydist import DisagreementError
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

pytestmark = pytest.mark.slow
SIZES = [0, 5, 9_000, 20_000, 33_000, 60_000, 70_000, 131_072, 200_000, 600_000]
"""Elements of 4 bytes: of nothing, of what goes with the frame, of a chunk, of several, and of what has no room."""


def wait_for(handles, after=()):
    for handle in handles:
        handle.wait()
    for step in after:
        step()


class Schedule:
    """The messages of one rank; both ranks draw the same ones."""

    def __init__(self, seed, rank, group):
        self.draw, self.rank, self.group = random.Random(seed), rank, group
        self.count, self.posted, self.later = 0, [], []

    def play(self):
        for _ in range(self.draw.randint(1, 8)):
            self.message()
        for tree, handles, after, want in self.later:
            wait_for(handles, after)
            self.check(tree, want)
        wait_for(self.posted if self.draw.random() < 0.5 else ())  # the others are dropped
        self.posted, self.later = [], []
        if self.draw.random() < 0.1:
            self.group.barrier()

    def message(self):
        draw, group = self.draw, self.group
        src, is_posted, is_later, is_refused = (draw.random() < share for share in (0.5, 0.7, 0.5, 0.04))
        self.count += 1
        want = {str(i): torch.arange(draw.choice(SIZES)) + self.count for i in range(draw.randint(1, 3))}
        want = {name: value.float() for name, value in want.items()}
        if is_refused:
            with pytest.raises(DisagreementError):
                self.refused(src, is_posted, want)
        elif self.rank == src:
            self.posted += group.isend_tensor_dict(want) if is_posted else group.send_tensor_dict(want) or []
        elif is_later:
            self.later.append((*group.irecv_tensor_dict(), want))
        else:
            self.check(group.recv_tensor_dict(), want)

    def refused(self, src, is_posted, want):
        if self.rank != src:
            self.group.recv_object(int(src))
        wait_for(self.group.isend_tensor_dict(want) if is_posted else self.group.send_tensor_dict(want) or [])

    def check(self, tree, want):
        assert all(torch.equal(tree[name], value) for name, value in want.items()), f"message {self.count} or before"


@pytest.mark.parametrize("seed", launching.sampled(range(launching.examples(4))))
@distributed(world_size=2)
def test_messages_arrive_in_order_with_their_values(rank, seed):
    group = GroupCoordinator([[0, 1]], rank, "gloo", False)
    schedule = Schedule(seed, rank, group)
    for _ in range(60):
        schedule.play()
    group.barrier()
    group.destroy()
