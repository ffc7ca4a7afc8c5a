"""Facts about torch's groups, with its private names and without them."""

import pytest
import torch.distributed as dist

from easydist.base import torch_groups

LIMIT = torch_groups.default_timeout()


@pytest.fixture
def groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD, dist.new_group([0])
    dist.destroy_process_group()


@pytest.fixture(params=["with", "without"])
def tables(request, monkeypatch):
    """Run a test in a torch with all its private names, and in one that lacks its tables."""
    if request.param == "without":
        monkeypatch.setattr(torch_groups, "_world", None)


def test_a_group_is_known_until_it_is_destroyed(groups, tables):
    world, group = groups
    assert torch_groups.is_known(world)
    assert torch_groups.is_known(group)
    assert torch_groups.places(group) == {0: 0}
    assert torch_groups.backend_of(group) == "gloo"
    dist.destroy_process_group(group)
    assert torch_groups.is_known(world)
    assert not torch_groups.is_known(group)
    assert torch_groups.places(group) is None


def test_none_is_no_group(groups, tables):
    assert not torch_groups.is_known(None)


def test_groups_are_counted_and_named(groups):
    world, group = groups
    assert set(torch_groups.known()) == {world, group}
    count = torch_groups.count()
    torch_groups.set_count(count + 5)
    later = dist.new_group([0])
    assert torch_groups.count() == count + 6
    assert torch_groups.free_name("new") == "new"
    assert torch_groups.free_name(later.group_name) == f"{later.group_name}_2"


def test_without_tables_groups_are_neither_listed_nor_counted(groups, monkeypatch):
    monkeypatch.setattr(torch_groups, "_world", None)
    torch_groups.set_count(7)
    assert (torch_groups.known(), torch_groups.count()) == ([], 0)
    assert torch_groups.free_name("new") == "new"


@pytest.mark.parametrize("name", ["_world", "_set_default", "_forget_names"])
def test_a_copy_of_a_rank_that_cannot_leave_its_parents_groups_is_told(groups, monkeypatch, name):
    monkeypatch.setattr(torch_groups, name, None)
    with pytest.raises(NotImplementedError, match=r"this torch \(.*\) lacks an internal function; use another version"):
        torch_groups.forget_all()
    assert dist.group.WORLD is groups[0]


def test_limits_are_torchs_or_half_an_hour(monkeypatch):
    assert torch_groups.default_timeout("gloo") == dist.distributed_c10d.default_pg_timeout
    monkeypatch.setattr(torch_groups, "_default_timeout", None)
    assert torch_groups.default_timeout("nccl").total_seconds() == 1800


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_make", lambda: torch_groups.made([0], 0, "gloo", dist.HashStore(), "x", LIMIT)),
        ("_name_group", lambda: torch_groups.present(None, "x", [0], ("gloo", "cpu"), dist.HashStore(), "")),
        ("_default_store", torch_groups.default_store),
    ],
)
def test_what_cannot_be_done_without_a_name_is_an_error(groups, monkeypatch, name, call):
    monkeypatch.setattr(torch_groups, name, None)
    with pytest.raises(NotImplementedError):
        call()
    assert len(torch_groups.known()) == 2


def test_new_groups_meet_in_another_store(groups):
    store = dist.HashStore()
    torch_groups.set_default_store(store)
    before = store.num_keys()
    dist.new_group([0])
    assert store.num_keys() > before
    assert torch_groups.backend_of(groups[0]) == "gloo"
