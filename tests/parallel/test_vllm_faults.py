"""Faults that were found in vLLM 0.33: each has a test here or elsewhere that shows it absent."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from coordinators import made, text_of

from easydist.testing import distributed

TESTS = Path(__file__).parent.parent
COLLECTIVES, PAIRS, HANDLES, GROUPS = (
    f"parallel/test_{name}.py" for name in ("collectives", "pairs", "handles", "groups")
)
QUEUE, ENDS, TCP = "queue/test_queue.py", "queue/test_queue_ends.py", "queue/test_queue_tcp.py"
HERE = "parallel/test_vllm_faults.py"

FAULTS = {
    "reduce_scatter is wrong for dim >= 2": (COLLECTIVES, "test_sums_equal_those_of_one_process"),
    "all_gatherv, reduce_scatterv raise on the CPU and on one rank": (COLLECTIVES, "test_sizes_may_differ_and_be_zero"),
    "all_reduce is in place, and damages the neighbours of strided input": (COLLECTIVES, "test_strided_tensors"),
    "non-contiguous tensors arrive in memory order": (PAIRS, "test_every_awkward_tree_arrives_as_it_is"),
    "the sender raises after its metadata went out": (PAIRS, "test_two_that_mean_different_things"),
    "fp8, int16, uint16, uint32 are refused": (PAIRS, "test_tensors_and_objects_from_rank_to_rank"),
    "requires_grad and Parameter are lost": (PAIRS, "test_every_awkward_tree_arrives_as_it_is"),
    "group and metadata_group are ignored": (PAIRS, "test_group_and_metadata_group_carry"),
    "with the queue, src has to be 0": (PAIRS, "test_objects_come_from_any_source"),
    "src=-1 returns None everywhere": (COLLECTIVES, "test_wrong_calls_are_the_same_error"),
    "a rank in no list hits a bare assertion": (GROUPS, "test_lists_that_do_not_fit_are_refused"),
    "all_gather_group on one side only: uninitialised memory": (PAIRS, "test_two_that_mean_different_things"),
    "a second wait() of a handle hangs": (HANDLES, "test_handles_are_waited_for_twice"),
    "dropped sends keep their payload forever": (HANDLES, "test_a_hundred_dropped_handles_keep_nothing"),
    "changes after enqueue arrive": (QUEUE, "test_changes_after_enqueue_do_not_arrive"),
    "a timeout during a large message shifts the stream": (ENDS, "test_time_is_over_in_the_middle_of_a_message"),
    "readers over TCP have no flow control": (ENDS, "test_slow_readers_make_the_writer_wait"),
    "a reader that waits burns a core": (ENDS, "test_waiting_does_not_use_the_core"),
    "a blocked writer cannot be cancelled": (ENDS, "test_waits_are_cancelled"),
    "no dead peer is noticed": (ENDS, "test_writer_that_is_killed"),
    "socket files stay behind": (QUEUE, "test_nothing_is_left_behind"),
    "a small /dev/shm ends in SIGBUS": (TCP, "test_host_without_shared_memory"),
    "pickle everywhere": (QUEUE, "test_what_is_not_allow_listed_is_refused_by_both_ends"),
    "prepare_communication_buffer_for_model is gone": (GROUPS, "test_destroy_takes_everything_down"),
    "graph_capture fails on the CPU": (GROUPS, "test_destroy_takes_everything_down"),
    "dispatch and dispatch_router_logits are different methods": (GROUPS, "test_a_mixture_of_experts"),
    "single-reader queues fail on the CPU": (PAIRS, "test_objects_come_from_any_source"),
    "one rank: recv_tensor_dict returns None": (HERE, "test_one_rank_has_nobody_to_send_to"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_a_test(fault):
    path, name = FAULTS[fault]
    assert f"def {name}" in (TESTS / path).read_text()


@distributed(world_size=1)
def test_one_rank_has_nobody_to_send_to(rank):
    with made(rank, 1) as group:
        calls = {
            "send": lambda: group.send(torch.ones(1)),
            "recv": lambda: group.recv(torch.Size([1]), torch.float32),
            "send_object": lambda: group.send_object(1, 0),
            "recv_object": lambda: group.recv_object(0),
            "isend_object": lambda: group.isend_object(1, 0),
        }
        for name, call in calls.items():
            assert text_of(call).startswith(f"ValueError: {name}: "), name
            assert "is not another rank of the group, which has 1 rank (0); this is rank 0" in text_of(call)


@distributed(world_size=1)
def test_trees_of_one_rank_go_nowhere(rank):
    tree = {"x": torch.ones(1)}
    with made(rank, 1) as group:
        for peer in (None, 0):
            assert group.send_tensor_dict(tree, peer) is tree
            assert group.isend_tensor_dict(tree, peer) == []
            assert group.recv_tensor_dict(peer) is None
            assert group.irecv_tensor_dict(peer) == (None, [], [])
        assert text_of(lambda: group.recv_tensor_dict(1)).startswith(
            "ValueError: recv_tensor_dict: src=1 is not a rank"
        )
    for call in (lambda: group.send_tensor_dict(tree), group.recv_tensor_dict):
        assert "was destroyed" in text_of(call)


@distributed(world_size=2)
def test_torchs_own_calls_on_device_group_and_the_coordinators_do_not_meet(rank):
    sums = []

    def with_torch(group):
        for step in range(20):
            x = torch.full((1000,), float(rank + step))
            dist.all_reduce(x, group=group.device_group)
            dist.send(x, group.next_rank, group=group.device_group) if rank == 0 else dist.recv(
                x, group.next_rank, group=group.device_group
            )
            sums.append(x[0].item())

    with made(rank, 2) as group:
        thread = threading.Thread(target=with_torch, args=(group,))
        thread.start()
        for step in range(20):
            assert group.all_reduce(torch.full((1000,), float(rank))).tolist() == [1.0] * 1000
            if rank == 0:
                group.send_tensor_dict({"step": step, "x": torch.ones(100_000)})
            else:
                assert group.recv_tensor_dict()["step"] == step
        thread.join()
        assert sums == [2.0 * step + 1 for step in range(20)]
