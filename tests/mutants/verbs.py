"""Faults of ``easydist/verbs``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "verbs/broadcast.py",
        "_CopyTensorToDevices.validate",
        "if len(holders) != 1:",
        "if not holders:",
        "tests/verbs/test_broadcast.py::test_copy_tensor_to_devices_finds_the_one_holder",
    ),
    Mutant(
        "verbs/buckets.py",
        "large_alone",
        "if nbytes[i] >= LARGE",
        "if nbytes[i] > LARGE",
        "easydist/verbs/buckets.py",
    ),
    Mutant(
        "verbs/gather.py",
        "Gather._gather",
        "nbytes = lengths if tied else smallest(shapes, leaves.layout.dtypes)",
        "nbytes = lengths",
        "tests/verbs/test_gather.py::test_leaves_that_are_large_on_one_rank_only",
    ),
    Mutant(
        "verbs/gradients.py",
        "Gradient.learn",
        "functools.reduce(int.__or__, marks)",
        "functools.reduce(int.__and__, marks)",
        "tests/verbs/test_gradients.py -k requires_grad_on_any_rank",
    ),
    Mutant(
        "verbs/swap.py",
        "_Swap.result",
        "[joined[i] for i in leaves.layout.places]",
        "[joined[i] for i in range(len(joined))]",
        "tests/verbs/test_backward.py::test_backward_is_one_exchange_for_the_whole_tree",
    ),
    Mutant(
        "verbs/parameters.py",
        "_kept",
        "[parameter.detach().clone() for parameter in params]",
        "[parameter.detach() for parameter in params]",
        "tests/verbs/test_parameters.py::test_without_modifier_rank_changes_are_thrown_away",
    ),
    Mutant(
        "verbs/random.py",
        "set_seed",
        "ProcessState().process_index",
        "ProcessState().local_process_index",
        "tests/verbs/test_random.py",
    ),
    Mutant(
        "verbs/reduce.py",
        "Reduce.exchange",
        "None if group.is_bound else self._dst",
        "self._dst",
        "tests/verbs/test_reductions.py -k overflow",
    ),
    Mutant(
        "verbs/tensor_dict_broadcast.py",
        "BroadcastTensorDict.prepare",
        "bool(self._buffers or outgoing.needs_answer)",
        "bool(self._buffers)",
        "tests/verbs/test_tensor_dicts.py -k with_objects",
    ),
    Mutant(
        "verbs/tensor_dict_recipes.py",
        "_is_odd",
        "        or tensor.requires_grad\n",
        "",
        "tests/verbs/test_tensor_dicts.py",
    ),
    Mutant(
        "agreement/frames.py",
        "Agreement.payload_of",
        "nbytes = self.nbytes[rank]",
        "nbytes = self.nbytes[0]",
        "tests/verbs/test_broadcast.py::test_a_structure_larger_than_a_frame_comes_from_any_source",
    ),
    Mutant(
        "verbs/tensor_dict_messages.py",
        "Announcement.__init__",
        "if _LENGTHS.size + sum(lengths) != message.numel():",
        "if _LENGTHS.size + sum(lengths) > message.numel():",
        "tests/verbs/test_tensor_dict_faults.py",
    ),
    Mutant(
        "verbs/ranks.py",
        "named_rank",
        "return index(rank)",
        "return rank",
        "tests/verbs/test_ranks.py::test_any_integer_names_a_rank",
    ),
]
