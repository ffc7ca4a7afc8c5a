"""Faults of ``easydist/weights``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "weights/blocks.py",
        "shard",
        "first = min(part * place[axis], sizes[dim])",
        "first = part * place[axis]",
        "tests/weights/test_blocks.py::test_shards_are_those_of_chunk",
    ),
    Mutant(
        "weights/checkpoint.py",
        "_BroadcastCheckpoint.__init__",
        "self._path, self._received = path, wanted",
        "self._path = path",
        "tests/weights/test_checkpoint.py::test_every_rank_has_what_the_file_holds",
    ),
    Mutant(
        "weights/exchange.py",
        "_in_group",
        "for rank in map(members.index, ranks) if rank != first",
        "for rank in ranks if rank != first",
        "tests/weights/test_state_dicts.py::test_sharded_sources_are_never_whole",
    ),
    Mutant(
        "weights/source.py",
        "Source.__init__",
        "(like, tuple(given), dtype, json.dumps(about))",
        "(like, dtype, json.dumps(about))",
        "tests/weights/test_state_dicts.py::test_what_is_known_of_weights_holds_for_those_that_are_like_them_alone",
    ),
    Mutant(
        "weights/source.py",
        "Source.__init__",
        "if key is not None and recipe.header.numel() <= LONGEST:",
        "if key is not None:",
        "tests/weights/test_state_dicts.py::test_a_plan_with_a_very_long_header_leaves_nothing",
    ),
    Mutant(
        "weights/target.py",
        "Target.finish",
        "        torch.autograd.graph.increment_version(written)\n",
        "",
        "tests/weights/test_state_dicts.py::test_autograd_hears_of_what_was_written",
    ),
    Mutant(
        "weights/receivers.py",
        "_Model.fill",
        "for name, one in on_meta.items() if id(one) in filled",
        "for name, one in on_meta.items() if name in arrived",
        "tests/weights/test_state_dicts.py::test_modules_take_what_load_state_dict_takes",
    ),
    Mutant(
        "weights/holders.py",
        "Holder.regroup",
        "        if self.pending == newest > self.newest:\n            self.use(newest)\n",
        "",
        "tests/weights/test_versions.py::test_a_version_that_one_member_has_committed_is_complete_on_all",
    ),
    Mutant(
        "weights/resharding.py",
        "_wrong",
        "casts = side is wanted and all(",
        "casts = all(",
        "tests/weights/test_resharding.py::test_layouts_that_do_not_fit_are_refused_everywhere",
    ),
    Mutant(
        "weights/resharding.py",
        "_Moving.result",
        "increment_version([tensor for tensor in written if not tensor.is_inference()])",
        "increment_version([])",
        "tests/weights/test_resharding.py::test_autograd_hears_of_what_was_written",
    ),
    Mutant(
        "weights/schedule.py",
        "UnderWay.add",
        "        self._room -= packet.nbytes\n",
        "",
        "tests/weights/test_state_dicts.py::test_memory_is_bounded_by_the_bucket",
    ),
    Mutant(
        "weights/ray.py",
        "ray_broadcast_tensor_dict",
        "Wanted(None, None, False, True, where, pin_memory)",
        "Wanted(None, None, False, False, where, pin_memory)",
        "tests/weights/test_ray.py::test_every_actor_raises_the_same_and_the_group_works_on",
    ),
    Mutant(
        "weights/manifest.py",
        "manifest",
        "_known(encoded) if len(encoded) <= LONGEST else Manifest(encoded)",
        "_known(encoded)",
        "tests/weights/test_state_dicts.py::test_only_headers_that_are_not_very_long_are_kept",
    ),
    Mutant(
        "weights/versions.py",
        "WeightReceiver.weights",
        "self.state if self.arrived is None else self._spare",
        "self.state",
        "tests/weights/test_versions.py::test_a_version_that_has_arrived_is_used_from_commit_on",
    ),
]
