"""torchdata's loader, which can be stopped in the middle of an epoch and resumed."""

import launching
import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import DistributedSampler

from easydist import gather_for_metrics
from easydist.testing import distributed

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # it calls what torch has deprecated


CASE = {"total": st.integers(0, 200), "batch_size": st.integers(1, 17), "stop": st.integers(0, 5), "own": st.booleans()}


@pytest.mark.slow
@settings(deadline=None, max_examples=launching.examples(3))
@given(cases=st.lists(st.fixed_dictionaries(CASE), min_size=10, max_size=10))
@distributed(world_size=(1, 2, 3, 4))
def test_resumed_in_the_middle(rank, world_size, cases):
    for case in cases:
        check_resumed(rank, world_size, **case)


def check_resumed(rank, world_size, total, batch_size, stop, own):
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def made():
        kind = StatefulDistributedSampler if own else DistributedSampler
        sampler = kind(range(total), world_size, rank, shuffle=False)
        return torchdata.StatefulDataLoader(range(total), batch_size, sampler=sampler)

    first, got = made(), []
    for i, batch in enumerate(first):
        got += gather_for_metrics(batch, loader=first).tolist()
        if i == stop:
            break
    second = made()
    second.load_state_dict(first.state_dict())
    for batch in second if is_left(first, stop) else ():
        got += gather_for_metrics(batch, loader=second).tolist()
    assert got == [*range(total)]


def is_left(loader, stop):
    """True if an epoch has batches after the one at which it was stopped."""
    return len(loader) > stop + 1
