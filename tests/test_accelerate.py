"""Replacing accelerate's functions by easydist's: which names, in which modules, for how long, in which states."""

import pickle
import sys
import types

import accelerate
import numpy as np
import pytest
import torch
from accelerate import utils
from accelerate.utils import gather, operations, reduce as reduced
from accelerate.utils.operations import DistributedOperationException
from launching import forked

import easydist
import easydist.accelerate
from easydist.testing import distributed

NAMES = easydist.accelerate.FUNCTIONS.keys() | easydist.accelerate.CLASSES.keys()
OTHER_ARGUMENTS = {"save", "load"}
OTHER_VALUES = {"DistributedType", "PartialState", "memory"}


def installed():
    return {name: vars(utils).get(name) or getattr(operations, name) for name in NAMES}


THEIRS = installed()


@pytest.fixture(autouse=True)
def reset():
    yield
    easydist.accelerate.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def is_ours(function):
    return getattr(getattr(function, "__wrapped__", function), "__module__", "").startswith("easydist.")


def test_every_name_of_accelerates_that_easydist_has_is_replaced():
    shared = {name for name in easydist.__all__ if hasattr(utils, name) or hasattr(operations, name)}
    assert shared - OTHER_ARGUMENTS - OTHER_VALUES == NAMES
    assert not any(map(is_ours, THEIRS.values()))


def test_the_names_are_ours_wherever_they_were_imported():
    own = types.ModuleType("script")
    sys.modules["script"] = own
    own.collect, own.mine = gather, len
    try:
        with easydist.accelerate.enable():
            modules = [utils, operations, accelerate.accelerator, accelerate.data_loader, sys.modules[__name__]]
            assert all(is_ours(vars(m)[name]) for m in modules for name in NAMES & vars(m).keys())
            assert own.collect is gather is utils.gather
            assert gather.__wrapped__ is easydist.gather
            assert DistributedOperationException is easydist.DistributedOperationException
            own.later = utils.reduce
            kept = utils.gather
        assert own.collect is gather is THEIRS["gather"]
        assert own.later is reduced is THEIRS["reduce"]
        assert own.mine is len
    finally:
        del sys.modules["script"]
    assert installed() == THEIRS
    assert kept(torch.tensor(3.0)).shape == (), "kept elsewhere, it calls accelerate's"
    assert DistributedOperationException is THEIRS["DistributedOperationException"]
    assert easydist.TensorInformation is easydist.accelerate.CLASSES["TensorInformation"]


def test_blocks_may_be_nested():
    with easydist.accelerate.enable():
        with easydist.accelerate.enable():
            assert is_ours(utils.gather)
        assert is_ours(utils.gather)
    assert not is_ours(utils.gather)


def test_twice_is_as_good_as_once():
    easydist.accelerate.enable()
    easydist.accelerate.enable()
    with easydist.accelerate.enable():
        assert is_ours(utils.gather)
    assert is_ours(utils.gather)
    easydist.accelerate.disable()
    assert not is_ours(utils.gather)
    easydist.accelerate.disable()


def test_a_module_that_is_imported_later_gets_ours():
    with easydist.accelerate.enable():
        scope = {}
        exec("from accelerate.utils import gather, find_batch_size", scope)
        assert is_ours(scope["gather"])


def test_what_holds_our_functions_can_be_pickled():
    held = [function for theirs, function in easydist.accelerate._pairs() if not isinstance(function, type)]
    with easydist.accelerate.enable():
        assert all(pickle.loads(pickle.dumps(function)) is function for function in held)
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True)
        )
        accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0)))
        dumped = pickle.dumps(accelerator)
    assert isinstance(pickle.loads(dumped), accelerate.Accelerator)


@pytest.mark.slow
def test_the_import_alone_has_no_effect():
    code = "import sys, easydist.accelerate; assert 'accelerate' not in sys.modules; easydist.accelerate.disable()"
    forked("-c", f"{code}; assert 'accelerate' not in sys.modules")


def test_one_process_without_a_group():
    accelerator = accelerate.Accelerator(cpu=True)
    with easydist.accelerate.enable():
        assert accelerator.gather({"step": 3})["step"].tolist() == [3]
        assert accelerator.reduce({"right": 3}) == {"right": 3}
        assert accelerator.pad_across_processes(np.ones(2)).tolist() == [1, 1]
        assert list(accelerator.prepare(torch.utils.data.DataLoader([1, 2]))) == [1, 2]
        accelerator.wait_for_everyone()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("data", [torch.ones(3), ["a", "b"], {"x": torch.ones(2), "id": ["a", "b"]}, {"loss": 0.5}])
def test_gather_for_metrics_of_one_process_is_accelerates(data, whole):
    accelerator = accelerate.Accelerator(cpu=True)
    expected = accelerator.gather_for_metrics(data, use_gather_object=whole)
    with easydist.accelerate.enable():
        found = accelerator.gather_for_metrics(data, use_gather_object=whole)
        assert accelerator.gather_for_metrics(["b", "a"], indices=[1, 0]) == ["a", "b"]
    assert str(found) == str(expected)


@pytest.mark.parametrize(("data", "error"), [("a", TypeError), ({}, ValueError), ([], ValueError)])
def test_find_batch_size_raises_what_accelerates_raises(data, error):
    with pytest.raises(error) as theirs:
        utils.find_batch_size(data)
    with easydist.accelerate.enable():
        with pytest.raises(error) as ours:
            utils.find_batch_size(data)
        assert utils.find_batch_size(["text", np.ones((3, 2))]) == 3
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_accelerates_own_run_in_states_that_are_not_served(kind):
    accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType[kind]
    with easydist.accelerate.enable():
        assert utils.convert_to_fp32.__wrapped__ is easydist.convert_to_fp32
        array = np.ones(2)
        assert utils.listify({"x": array})["x"] is array
        accelerate.PartialState().distributed_type = accelerate.DistributedType.NO
        assert utils.listify({"x": array}) == {"x": [1.0, 1.0]}


@pytest.mark.slow
@distributed(world_size=2)
def test_a_process_that_is_alone_for_accelerate_stays_alone(rank):
    accelerate.PartialState._reset_state()
    accelerate.PartialState().distributed_type = accelerate.DistributedType.NO
    with easydist.accelerate.enable():
        assert utils.gather(torch.ones(rank)).numel() == rank
        accelerate.PartialState._reset_state()
        assert utils.gather(torch.ones(rank)).numel() == 1


def accelerator_of(rank, size):
    """Return an ``Accelerator`` in the group that exists already."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1} | sizes).items():
            patch.setenv(name, str(value))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(cpu=True)


@pytest.mark.slow
@distributed(world_size=2)
def test_bad_input_is_the_same_error_and_the_script_goes_on(rank):
    accelerator = accelerator_of(rank, 2)
    with easydist.accelerate.enable():
        with pytest.raises(utils.operations.DistributedOperationException, match="rank 1: float32") as caught:
            accelerator.gather(torch.ones(2, 1 + rank))
        assert "test_accelerate.py:" in str(caught.value), "the script's line, not accelerate's"
        assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_rank_without_samples_gathers_those_of_the_others(rank):
    """A dispatching loader gives nothing to the last rank, so its list of names is empty."""
    accelerator = accelerator_of(rank, 3)
    accelerator.dataloader_config.dispatch_batches = True
    loader = accelerator.prepare(torch.utils.data.DataLoader([7]))
    with easydist.accelerate.enable():
        for batch in loader:
            names = [f"n{i}" for i in batch.tolist()]
            assert len(names) == (rank < 2)
            assert accelerator.gather_for_metrics(names) == ["n7"]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@distributed(world_size=[1, 2, 3])
def test_what_cannot_hold_the_filling_passes_where_no_rank_has_to_pad_it(rank, world_size):
    accelerator = accelerator_of(rank, world_size)
    data = {"ids": torch.ones(2, 3 + rank), "mask": torch.ones(1 + rank, 2, dtype=torch.bool)}
    data["image"] = torch.full((1, 4, 4), 200, dtype=torch.uint8)
    with easydist.accelerate.enable():
        padded = accelerator.pad_across_processes(data, dim=1, pad_index=-100)
        assert padded["mask"] is data["mask"]
        assert padded["image"] is data["image"]
        assert padded["ids"][0].tolist() == [1.0] * (3 + rank) + [-100.0] * (world_size - 1 - rank)
        if world_size > 1:
            data["mask"] = torch.ones(1, 2 + rank, dtype=torch.bool)
            with pytest.raises(ValueError, match=r"\['mask'\] is torch\.bool, which cannot hold pad_index=-100"):
                accelerator.pad_across_processes(data, dim=1, pad_index=-100)
        assert accelerator.gather(torch.ones(1)).tolist() == [1.0] * world_size


def trained(rank, steps=5):
    """Train two layers with a mean over ranks in the loss, through the name that the script has imported."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        out = model(x)
        terms = {"mean": out.square().mean(0), "norm": model[0].weight.norm()}
        mean, total = utils.reduce(terms, "mean"), reduced(out.sin().sum(), "sum")
        mean["norm"] *= 0.1
        optimizer.zero_grad()
        (out.logsumexp(1).mean() + mean["mean"].sum() ** 2 + mean["norm"] + 0.01 * total.square()).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:c10d..allreduce_")  # torch warns of the gradient that accelerate's function keeps
@distributed(world_size=[1, 2, 3])
def test_a_loss_with_a_mean_over_ranks_trains_to_the_same_weights(rank, world_size):
    assert accelerator_of(rank, world_size).num_processes == world_size
    theirs = trained(rank)
    with easydist.accelerate.enable():
        ours = trained(rank)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(theirs[0], trained(rank, 0)[0])
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
