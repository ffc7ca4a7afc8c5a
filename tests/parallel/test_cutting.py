"""The shares of a tree that a rank sends, and the terms on which it does; no process is needed."""

import pytest
import torch

from easydist.errors import DisagreementError
from easydist.parallel.all_gather_hop import Terms, cut, saves_bytes


def terms(size=2, **asked):
    return Terms(size, asked)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_takes_its_share_and_tells_the_whole_shape(rank):
    x = torch.arange(24.0).view(4, 6).t()
    got, shapes = cut({"x": x, "n": [x[:3], 5]}, terms(3), rank, True)
    assert torch.equal(got["x"], x.reshape(3, 8)[rank])
    assert torch.equal(got["n"][0], x[:3].reshape(3, 4)[rank])
    assert got["n"][1] == 5
    assert shapes == {"['x']": [6, 4], "['n'][0]": [3, 4]}


def test_a_tensor_that_has_no_equal_shares_stays_whole():
    data = {"odd": torch.ones(3), "empty": torch.ones(0, 2), "scalar": torch.tensor(1.0), "even": torch.ones(4)}
    got, shapes = cut(data, terms(odd=True, empty=True), 0, True)
    assert all(got[name] is data[name] for name in ("odd", "empty", "scalar"))
    assert shapes == {"['even']": [4]}


@pytest.mark.parametrize("by_default", [False, True])
def test_the_caller_may_ask_for_a_share_or_forbid_it(by_default):
    data = {"yes": torch.ones(2), "no": torch.ones(2), "rest": torch.ones(2), "deep": {"yes": torch.ones(2)}}
    asked = {"yes": True, "no": False, "['deep']['yes']": True}
    _, shapes = cut(data, terms(**asked), 0, by_default)
    assert [*shapes] == ["['yes']", *(["['rest']"] if by_default else []), "['deep']['yes']"]


def test_without_a_share_the_tree_is_sent_itself():
    data = {"x": torch.ones(4)}
    for some, by_default in ((terms(1), True), (terms(), False), (terms(x=False), True), (terms(x=False), False)):
        got, shapes = cut(data, some, 0, by_default)
        assert got is data
        assert shapes == {}


def test_a_tensor_that_is_there_twice_has_one_share_which_needs_no_gradient():
    x = torch.ones(4, requires_grad=True)
    got, shapes = cut([x, x], terms(), 1, True)
    assert got[0] is got[1]
    assert not got[0].requires_grad
    assert [*shapes] == ["[0]", "[1]"]


@pytest.mark.parametrize("theirs", [None, [3, {}], [2, {"x": True}]])
def test_both_sides_have_to_ask_for_the_same(theirs):
    with pytest.raises(
        DisagreementError, match=r"rank 4 sends with .*\n  rank 1 receives with an all_gather_group of 2"
    ):
        terms().check(theirs, 4, 1)
    terms().check([2, {}], 4, 1)
    terms(1).check(None, 4, 1)


def test_shares_pay_between_hosts_if_all_that_send_them_are_on_one():
    assert saves_bytes("a", "b", ["a", "a"])
    assert not saves_bytes("a", "a", ["a", "a"])
    assert not saves_bytes("a", "b", ["a", "b"])
