"""The names, orders and defaults of the page, and those of the newer methods."""

import inspect

import pytest

import easydist.coordinator
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

NEEDED = inspect.Parameter.empty
PAGE = {
    "_all_gather_out_place": {"input_": NEEDED, "dim": NEEDED},
    "_all_reduce_out_place": {"input_": NEEDED},
    "_reduce_scatter_out_place": {"input_": NEEDED, "dim": NEEDED},
    "all_gather": {"input_": NEEDED, "dim": -1},
    "all_gatherv": {"input_": NEEDED, "dim": 0, "sizes": None},
    "all_reduce": {"input_": NEEDED},
    "allocate_combine_input": {"shape": NEEDED, "dtype": NEEDED, "device": NEEDED, "is_sequence_parallel": False},
    "barrier": {},
    "broadcast": {"input_": NEEDED, "src": 0},
    "broadcast_object": {"obj": None, "src": 0},
    "broadcast_object_list": {"obj_list": NEEDED, "src": 0, "group": None},
    "broadcast_tensor_dict": {"tensor_dict": None, "src": 0, "group": None, "metadata_group": None},
    "combine": {"hidden_states": NEEDED, "is_sequence_parallel": False},
    "combine_into_output": {"hidden_states": NEEDED, "output": NEEDED, "is_sequence_parallel": False},
    "cpu_all_reduce_": {"tensor": NEEDED},
    "create_mq_broadcaster": {"writer_rank": 0, "external_writer_handle": None, "blocking": True},
    "create_single_reader_mq_broadcasters": {"reader_rank_in_group": 0, "blocking": False},
    "destroy": {},
    "dispatch": {
        "hidden_states": NEEDED,
        "router_logits": NEEDED,
        "is_sequence_parallel": False,
        "extra_tensors": None,
    },
    "gather": {"input_": NEEDED, "dst": 0, "dim": -1},
    "graph_capture": {"graph_capture_context": None},
    "isend_object": {"obj": NEEDED, "dst": NEEDED},
    "make_sibling_device_group": {"group_desc": None},
    "prepare_communication_buffer_for_model": {"model": NEEDED},
    "recv": {"size": NEEDED, "dtype": NEEDED, "src": None},
    "recv_object": {"src": NEEDED},
    "recv_tensor_dict": {"src": None, "all_gather_group": None, "all_gather_tensors": None},
    "reduce_scatter": {"input_": NEEDED, "dim": -1},
    "reduce_scatterv": {"input_": NEEDED, "dim": -1, "sizes": None},
    "reduce_scatterv_into_output": {"input_": NEEDED, "output": NEEDED, "dim": -1, "sizes": None},
    "send": {"tensor": NEEDED, "dst": None},
    "send_object": {"obj": NEEDED, "dst": NEEDED},
    "send_tensor_dict": {"tensor_dict": NEEDED, "dst": None, "all_gather_group": None, "all_gather_tensors": None},
}
NEWER = {
    "isend_tensor_dict": PAGE["send_tensor_dict"],
    "irecv_tensor_dict": PAGE["recv_tensor_dict"],
    "dispatch_router_logits": PAGE["dispatch"],
}
CONSTRUCTOR = {
    "group_ranks": NEEDED,
    "local_rank": NEEDED,
    "torch_distributed_backend": NEEDED,
    "use_device_communicator": NEEDED,
    "use_message_queue_broadcaster": False,
    "group_name": None,
    "use_all2all": False,
}
PROPERTIES = ["first_rank", "is_first_rank", "is_last_rank", "last_rank", "next_rank", "prev_rank"]


def positional(function):
    """Parameters that may be given by position, without ``self``, and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}


@pytest.mark.parametrize("name", PAGE | NEWER)
def test_methods_have_the_parameters_of_the_page(name):
    assert list(positional(getattr(GroupCoordinator, name)).items()) == list((PAGE | NEWER)[name].items())


def test_the_constructor_takes_what_the_page_says_and_one_thing_more_by_name():
    assert list(positional(GroupCoordinator).items()) == list(CONSTRUCTOR.items())
    more = inspect.signature(GroupCoordinator).parameters.keys() - CONSTRUCTOR.keys()
    assert more == {"weights_only"}


def test_it_is_found_under_both_paths():
    assert easydist.coordinator.GroupCoordinator is GroupCoordinator
    assert easydist.parallel.GroupCoordinator is GroupCoordinator


@distributed(world_size=4)
def test_attributes_tell_of_the_group_and_of_this_ranks_place_in_it(rank):
    group = GroupCoordinator([[1, 3], [0, 2]], rank, "gloo", True, group_name="pp")
    assert (group.rank, group.local_rank, group.world_size, group.device.type) == (rank, rank, 2, "cpu")
    assert group.ranks == ([0, 2] if rank in (0, 2) else [1, 3])
    assert group.rank_in_group == rank // 2
    place, (first, last) = group.rank_in_group, group.ranks
    assert [getattr(group, name) for name in PROPERTIES] == [first, place == 0, place == 1, last, last + first - rank,
                                                              last + first - rank]  # fmt: skip
    assert group.cpu_group.size() == 2
    assert group.device_group is group.cpu_group
    again = GroupCoordinator([[0], [1], [2], [3]], 0, None, False, group_name="pp")
    assert group.unique_name.startswith("pp:")
    assert again.unique_name.startswith("pp:")
    assert again.unique_name != group.unique_name
    assert (again.next_rank, again.prev_rank) == (rank, rank)
