"""Faults of ``easydist/metrics``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "metrics/loader.py",
        "DistributedLoader._dealt",
        "if (comms.rank, comms.size) != self._source.parameters[:2]:",
        "if False:",
        "tests/metrics/test_loader.py -k older_than_the_group",
    ),
    Mutant(
        "metrics/sampler.py",
        "DistributedBatchSampler.world_size",
        "return ProcessState().num_processes if self._world_size is None else self._world_size",
        "return self._world_size or 1",
        "tests/metrics/test_loader.py -k older_than_the_group",
    ),
    Mutant(
        "metrics/store.py",
        "Store.rows",
        "_as_slice(torch.argsort(torch.argsort(numbers, stable=True)))",
        "_as_slice(torch.argsort(numbers, stable=True))",
        "tests/metrics/test_collector.py::test_files_take_what_is_above_the_limit_and_end_with_the_collector",
    ),
    Mutant(
        "metrics/indices.py",
        "_same_objects",
        "spec.paths == other.paths and spec.plain == other.plain",
        "spec.plain == other.plain",
        "tests/metrics/test_collector.py::test_another_value_of_one_sample_is_an_error_that_names_it",
    ),
    Mutant(
        "metrics/joining.py",
        "_is_same_date",
        "((found.astype(values.dtype) == values) | np.isnat(values))",
        "(found.astype(values.dtype) == values)",
        "tests/metrics/test_dtypes.py::test_a_sample_that_came_twice_may_be_of_another_width",
    ),
    Mutant(
        "metrics/loader.py",
        "DistributedLoader.__iter__",
        "        self._next = _Cursor(epoch, 0)\n",
        "",
        "tests/metrics/test_loader.py::test_an_epoch_that_was_left_begins_again "
        "tests/metrics/test_loader.py::test_the_epoch_that_was_loaded_is_gone_on_with",
    ),
    Mutant(
        "metrics/sampler.py",
        "_Shares.__iter__",
        "islice(self.dataset, self.start, None), self.start",
        "islice(self.dataset, self.start, None), 0",
        "tests/metrics/test_loader.py::test_workers_give_the_same",
    ),
    Mutant(
        "metrics/tally.py",
        "Tally._begin",
        "if at.finished == last.serial or last.has_ended:",
        "if last.has_ended:",
        "tests/metrics/test_usage.py::test_a_pass_that_came_to_its_end_without_its_rows_is_an_error_in_the_next_one",
    ),
    Mutant(
        "metrics/tally.py",
        "agreed_lot",
        "        tally.lose()\n",
        "        pass\n",
        "tests/metrics/test_usage.py::test_ranks_that_count_differently_after_a_failure_refuse_together",
    ),
    Mutant(
        "metrics/collector.py",
        "MetricCollector.missing",
        "is_here[self._store.indices] = 1",
        "is_here[: len(self._store.indices)] = 1",
        "tests/metrics/test_resumed.py::test_what_is_missing_is_one_exchange",
    ),
    Mutant(
        "metrics/collector.py",
        "MetricCollector.load_state_dict",
        """as_indices(state["indices"], "MetricCollector", self.total)""",
        """state["indices"]""",
        "tests/metrics/test_resumed.py::test_an_index_beyond_the_samples_is_refused",
    ),
    Mutant(
        "metrics/store.py",
        "_cloned",
        "else leaf.clone()",
        "else leaf",
        "tests/metrics/test_resumed.py::test_rows_that_are_loaded_are_copies",
    ),
    Mutant(
        "metrics/exact.py",
        "numbers",
        " or array.dtype.itemsize > 8",
        "",
        "tests/metrics/test_sums.py::test_wrong_values_are_refused_and_nothing_is_added",
    ),
    Mutant(
        "metrics/torchmetrics.py",
        "sync_dist",
        "part._update_count = count",
        "pass",
        "tests/metrics/test_torchmetrics.py::test_a_rank_may_have_no_data",
    ),
    Mutant(
        "metrics/known_loaders.py",
        "_strided",
        "each * size - skipped * steps.size - (steps.done or 0)",
        "each * size - (steps.done or 0)",
        "tests/metrics/test_gather_for_metrics.py::test_samplers_that_deal_every_nth_sample",
    ),
    Mutant(
        "metrics/loader.py",
        "DistributedLoader.__len__",
        "self.total // size if self._source.parameters.drop_last else -(-self.total // size)",
        "-(-self.total // size)",
        "tests/metrics/test_loader.py::test_steps_and_epochs "
        "tests/metrics/test_loader.py::test_an_epoch_is_followed_by_another_order",
    ),
    Mutant(
        "metrics/order.py",
        "_order",
        "    _check_last(rows, last, block, rest)\n",
        "",
        "tests/metrics/test_gather_for_metrics.py::test_rows_that_do_not_fit_the_last_step_are_refused",
    ),
    Mutant(
        "metrics/collector.py",
        "MetricCollector.update",
        "            self._add(indices, columns)\n            self._move()",
        "            self._move()\n        self._add(indices, columns)",
        "tests/metrics/test_collector.py",
    ),
]
