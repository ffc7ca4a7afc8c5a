"""``main_process_first`` and ``local_main_process_first``: who goes first, and what the others hear of errors."""

import pytest
import torch
import torch.distributed as dist
from groups import DEADLINE, events, everyone

import easydist
from easydist import CollectiveTimeout, DisagreementError, ProcessState, RemoteError
from easydist.testing import distributed

EVERY = (1, 2, 3, 4)
SEVERAL = (2, 3, 4)


@pytest.mark.parametrize(("method", "hosts"), [("main_process_first", 1), ("local_main_process_first", 2)])
@distributed(world_size=EVERY)
def test_the_main_process_goes_first(rank, world_size, method, hosts, tmp_path):
    store = events(tmp_path, world_size)
    per_host = -(-world_size // hosts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % per_host))
        first, others = ([r for r in range(world_size) if (r % per_host == 0) == is_main] for is_main in (True, False))
        store.set(f"came {rank}", "")
        with getattr(ProcessState(), method)():
            if rank in first:
                store.wait([f"came {r}" for r in others])
                assert not any(store.check([f"ran {r}"]) for r in others)
            else:
                assert store.check([f"ran {r}" for r in first])
            store.set(f"ran {rank}", "")
        assert store.check([f"ran {r}" for r in range(world_size)])


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
@pytest.mark.parametrize("error", [KeyError("boom"), SystemExit(3)], ids=lambda error: type(error).__name__)
@distributed(world_size=EVERY)
def test_when_the_main_process_raises_the_others_do_not_begin(rank, world_size, method, error):
    ran = []
    with (  # noqa: PT012 - what runs before is part of the law
        pytest.raises(type(error) if rank == 0 else RemoteError) as caught,
        getattr(ProcessState(), method)(),
    ):
        ran.append(rank)
        raise error
    assert ran == ([0] if rank == 0 else [])
    if rank:
        text = f"main_process_first: the body raised on rank 0\n  rank 0: {type(error).__name__}: {error}"
        assert str(caught.value) == text
    else:
        assert caught.value is error
    assert everyone() == list(range(world_size))


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
@distributed(world_size=SEVERAL)
def test_when_another_process_raises_everybody_hears(rank, world_size, method):
    ran = []
    with pytest.raises(ValueError if rank == 1 else RemoteError) as caught, getattr(ProcessState(), method)():  # noqa: PT012
        ran.append(rank)
        if rank == 1:
            raise ValueError("no space")
    assert ran == [rank]
    assert str(caught.value) == (
        "no space" if rank == 1 else "main_process_first: the body raised on rank 1\n  rank 1: ValueError: no space"
    )
    assert everyone() == list(range(world_size))


@distributed(world_size=4)
def test_main_process_first_decorates_a_function_and_nests(rank):
    state = ProcessState()

    @state.main_process_first()
    def body(value):
        return value + rank

    assert body(10) == 10 + rank
    assert everyone() == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
@distributed(world_size=4)
def test_the_first_rank_of_a_group_goes_first_in_it(rank, method, tmp_path):
    store = events(tmp_path, 4)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with getattr(ProcessState(), method)(group=pairs[rank % 2], timeout=DEADLINE):
        assert rank < 2 or store.check([f"ran {rank - 2}"])
        store.set(f"ran {rank}", "")
    assert store.check([f"ran {r}" for r in (rank % 2, rank % 2 + 2)])
    easydist.wait_for_everyone(group=pairs[rank % 2], timeout=DEADLINE)
    assert everyone() == [0, 1, 2, 3]


@distributed(world_size=4)
def test_the_first_rank_of_a_group_on_each_host_goes_first(rank, tmp_path):
    store = events(tmp_path, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {rank // 2}")
        group = dist.new_group([0, 1, 2, 3])
        with ProcessState().local_main_process_first(group=group, timeout=DEADLINE):
            if rank % 2 == 0:
                store.set(f"came {rank}", "")
                store.wait([f"came {other}" for other in (0, 2)])  # both are inside
            assert rank % 2 == 0 or store.check([f"came {rank - 1}"])
        easydist.wait_for_everyone(group=group, timeout=DEADLINE)
    assert everyone() == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [0, -1.0])
@distributed(world_size=2)
def test_a_timeout_that_leaves_no_time_is_refused_before_the_body(rank, limit):
    ran, state = [], ProcessState()
    if rank == 0:  # nobody else makes these calls, or hears of them
        for context in (state.main_process_first, state.local_main_process_first, easydist.together):
            with pytest.raises(ValueError, match="is not positive"), context(timeout=limit):
                ran.append(rank)
    assert not ran
    assert everyone() == [0, 1]


@distributed(world_size=(2, 3))
def test_a_collective_inside_the_first_body_is_an_error_for_all(rank, world_size):
    with pytest.raises(DisagreementError, match="ranks made different calls"), ProcessState().main_process_first():
        easydist.gather(torch.ones(1))
    assert everyone() == list(range(world_size))


@distributed(world_size=2)
def test_an_error_of_another_group_is_told_to_the_others(rank):
    def body():
        with ProcessState().main_process_first():
            if rank == 0:
                raise CollectiveTimeout("in another group")

    with pytest.raises(CollectiveTimeout if rank == 0 else RemoteError):
        body()
    assert everyone() == [0, 1]


@distributed(world_size=3)
def test_contexts_may_be_nested(rank, world_size):
    state, ran = ProcessState(), []
    with state.main_process_first(), state.local_main_process_first(), state.main_process_first():
        ran.append(rank)
    assert ran == [rank]
    assert everyone() == list(range(world_size))
