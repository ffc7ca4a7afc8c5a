"""torcheval's metrics over all ranks: the values of one process and of their own ``merge_state``, in one exchange."""

import contextlib
import copy
import warnings
from collections import defaultdict, deque

import pytest
import torch
from counting import exchanges

from easydist import DisagreementError, RemoteError
from easydist.metrics import (
    get_synced_metric,
    get_synced_metric_collection,
    get_synced_state_dict,
    get_synced_state_dict_collection,
    sync_and_compute,
    sync_and_compute_collection,
)
from easydist.testing import distributed

evaluation = pytest.importorskip("torcheval.metrics")

pytestmark = pytest.mark.slow  # torcheval takes seconds to load


def scores(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, generator=generator), torch.randint(0, 2, (rows,), generator=generator)


def classes(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 4, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def labels(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3, generator=generator), torch.randint(0, 2, (rows, 3), generator=generator)


def values(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(rows, generator=generator)
    return target + 0.5 * torch.randn(rows, generator=generator), target


def one(rows, seed):
    return (values(rows, seed)[0],)


def clicks(rows, seed):
    return (scores(rows, seed)[1].float(),)


def flags(rows, seed):
    return scores(rows, seed)[0], scores(rows, seed)[1].float()


def curve(rows, seed):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)).sort().values, flags(rows, seed)[0]


def queries(rows, seed):
    return *scores(rows, seed), torch.arange(rows) % 2


def sentences(rows, seed):
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "it", "rained", "all", "day"]
    said = [" ".join(words[(i + seed) % 4 : 5 + (3 * i + seed) % 6]) for i in range(rows)]
    return said, [" ".join(words[(i + seed) % 3 : 6 + (i + seed) % 5]) for i in range(rows)]


def references(rows, seed):
    said, references = sentences(rows, seed)
    return said, [[reference] for reference in references]


def tokens(rows, seed):
    logits, target = classes(rows, seed)
    return logits[None], target[None]


def images(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3, 8, 8, generator=generator), torch.rand(rows, 3, 8, 8, generator=generator)


def rates(rows, seed):
    return rows, 1.5 + seed % 7


def make(name, *args, **options):
    return lambda: getattr(evaluation, name)(*args, **options)


METRICS = {
    "AUC": (make("AUC"), curve),
    "BLEUScore": (make("BLEUScore", n_gram=2), references),
    "BinaryAUPRC": (make("BinaryAUPRC"), scores),
    "BinaryAUROC": (make("BinaryAUROC"), scores),
    "BinaryAccuracy": (make("BinaryAccuracy"), scores),
    "BinaryBinnedAUPRC": (make("BinaryBinnedAUPRC", threshold=5), scores),
    "BinaryBinnedAUROC": (make("BinaryBinnedAUROC", threshold=5), scores),
    "BinaryBinnedPrecisionRecallCurve": (make("BinaryBinnedPrecisionRecallCurve", threshold=5), scores),
    "BinaryConfusionMatrix": (make("BinaryConfusionMatrix"), scores),
    "BinaryF1Score": (make("BinaryF1Score"), scores),
    "BinaryNormalizedEntropy": (make("BinaryNormalizedEntropy"), flags),
    "BinaryPrecision": (make("BinaryPrecision"), scores),
    "BinaryPrecisionRecallCurve": (make("BinaryPrecisionRecallCurve"), scores),
    "BinaryRecall": (make("BinaryRecall"), scores),
    "BinaryRecallAtFixedPrecision": (make("BinaryRecallAtFixedPrecision", min_precision=0.5), scores),
    "Cat": (make("Cat"), one),
    "ClickThroughRate": (make("ClickThroughRate"), clicks),
    "HitRate": (make("HitRate", k=2), classes),
    "Max": (make("Max"), one),
    "Mean": (make("Mean"), one),
    "MeanSquaredError": (make("MeanSquaredError"), values),
    "Min": (make("Min"), one),
    "MulticlassAUPRC": (make("MulticlassAUPRC", num_classes=4), classes),
    "MulticlassAUROC": (make("MulticlassAUROC", num_classes=4), classes),
    "MulticlassAccuracy": (make("MulticlassAccuracy", average="macro", num_classes=4), classes),
    "MulticlassBinnedAUPRC": (make("MulticlassBinnedAUPRC", num_classes=4, threshold=5), classes),
    "MulticlassBinnedAUROC": (make("MulticlassBinnedAUROC", num_classes=4, threshold=5), classes),
    "MulticlassBinnedPrecisionRecallCurve": (
        make("MulticlassBinnedPrecisionRecallCurve", num_classes=4, threshold=5),
        classes,
    ),
    "MulticlassConfusionMatrix": (make("MulticlassConfusionMatrix", 4), classes),
    "MulticlassF1Score": (make("MulticlassF1Score"), classes),
    "MulticlassPrecision": (make("MulticlassPrecision"), classes),
    "MulticlassPrecisionRecallCurve": (make("MulticlassPrecisionRecallCurve", num_classes=4), classes),
    "MulticlassRecall": (make("MulticlassRecall"), classes),
    "MultilabelAUPRC": (make("MultilabelAUPRC", num_labels=3), labels),
    "MultilabelAccuracy": (make("MultilabelAccuracy"), labels),
    "MultilabelBinnedAUPRC": (make("MultilabelBinnedAUPRC", num_labels=3, threshold=5), labels),
    "MultilabelBinnedPrecisionRecallCurve": (
        make("MultilabelBinnedPrecisionRecallCurve", num_labels=3, threshold=5),
        labels,
    ),
    "MultilabelPrecisionRecallCurve": (make("MultilabelPrecisionRecallCurve", num_labels=3), labels),
    "MultilabelRecallAtFixedPrecision": (
        make("MultilabelRecallAtFixedPrecision", num_labels=3, min_precision=0.5),
        labels,
    ),
    "PeakSignalNoiseRatio": (make("PeakSignalNoiseRatio", data_range=1.0), images),
    "Perplexity": (make("Perplexity"), tokens),
    "R2Score": (make("R2Score"), values),
    "ReciprocalRank": (make("ReciprocalRank"), classes),
    "RetrievalPrecision": (make("RetrievalPrecision", k=100, num_queries=2, empty_target_action="pos"), queries),
    "Sum": (make("Sum"), one),
    "Throughput": (make("Throughput"), rates),
    "TopKMultilabelAccuracy": (make("TopKMultilabelAccuracy", k=2), labels),
    "WeightedCalibration": (make("WeightedCalibration"), flags),
    "WindowedBinaryAUROC": (make("WindowedBinaryAUROC", max_num_samples=50), scores),
    "WindowedBinaryNormalizedEntropy": (make("WindowedBinaryNormalizedEntropy", max_num_updates=3), flags),
    "WindowedClickThroughRate": (make("WindowedClickThroughRate", max_num_updates=3), clicks),
    "WindowedMeanSquaredError": (make("WindowedMeanSquaredError", max_num_updates=3), values),
    "WindowedWeightedCalibration": (make("WindowedWeightedCalibration", max_num_updates=3), flags),
    "WordErrorRate": (make("WordErrorRate"), sentences),
    "WordInformationLost": (make("WordInformationLost"), sentences),
    "WordInformationPreserved": (make("WordInformationPreserved"), sentences),
}
APART = {"Throughput"}
"""The metrics whose merged value is not that of one process with all data, as their pages say."""


@contextlib.contextmanager
def quiet():
    """Without the warnings of torch about what torcheval's ``compute`` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def filled(name, rank):
    """A metric that has seen this rank's data: other numbers of rows and batches on each rank, none on rank 2."""
    metric, data = METRICS[name][0](), METRICS[name][1]
    for batch in range((2, 1, 0)[rank]):
        metric.update(*data(8 + 2 * rank, 10 * rank + batch))
    return metric


def merged(name, size):
    """torcheval's own merge, in one process."""
    first, *others = [filled(name, rank) for rank in range(size)]
    for metric in (first, *others):
        metric._prepare_for_merge_state()
    return first.merge_state(others)


def alone(name, size):
    """A metric of one process that has seen all of it."""
    metric, data = METRICS[name][0](), METRICS[name][1]
    for rank in range(size):
        for batch in range((2, 1, 0)[rank]):
            metric.update(*data(8 + 2 * rank, 10 * rank + batch))
    return metric


def same(one, other, **tolerance):
    torch.testing.assert_close(one, other, equal_nan=True, **(tolerance or {"rtol": 0, "atol": 0}))


@distributed(world_size=(1, 2, 3), timeout=120)
@quiet()
def test_every_metric_is_that_of_one_process(rank, world_size):
    for name in METRICS:
        metric, expected = filled(name, rank), merged(name, world_size)
        before = metric.state_dict()
        same(sync_and_compute(metric), expected.compute())
        if name not in APART and not name.startswith("Windowed"):  # a merged window is longer
            same(sync_and_compute(metric), alone(name, world_size).compute(), rtol=1e-6, atol=1e-6)
        same(metric.state_dict(), before)


@distributed(world_size=(1, 2, 3), timeout=120)
@quiet()
def test_a_collection_takes_one_exchange(rank, world_size):
    metrics = {name: filled(name, rank) for name in METRICS}
    expected = {name: merged(name, world_size) for name in METRICS}
    small = {name: metrics[name] for name in ("Mean", "BinaryAUROC", "RetrievalPrecision", "Throughput")}
    same(sync_and_compute_collection(metrics), {name: metric.compute() for name, metric in expected.items()})
    same(get_synced_state_dict_collection(metrics), {name: metric.state_dict() for name, metric in expected.items()})
    assert world_size == 1 or exchanges(lambda: sync_and_compute_collection(small)) == ["header"]
    turned = small if rank else dict(reversed(small.items()))
    assert [*sync_and_compute_collection(turned)] == [*turned]
    assert sync_and_compute_collection({}) == {}


@distributed(world_size=(1, 2, 3))
def test_a_synced_metric_is_a_metric_of_its_own(rank, world_size):
    for name in ("Cat", "Mean", "RetrievalPrecision", "WindowedMeanSquaredError"):
        metric, expected = filled(name, rank), merged(name, world_size)
        before, synced = metric.state_dict(), get_synced_metric(metric)
        same(synced.state_dict(), expected.state_dict())
        same(get_synced_state_dict(metric), expected.state_dict())
        for each in (synced, expected):
            each.update(*METRICS[name][1](4, 99))
        same(synced.compute(), expected.compute())
        same(metric.state_dict(), before)
        same(get_synced_metric_collection({"a": metric})["a"].state_dict(), merged(name, world_size).state_dict())
        synced.reset()
        same(metric.state_dict(), before)


@distributed(world_size=3)
def test_one_recipient(rank):
    metric = filled("Mean", rank)
    expected = merged("Mean", 3)
    for recipient in range(3):
        options = {"recipient_rank": recipient}
        got = [
            sync_and_compute(metric, None, recipient),
            sync_and_compute_collection({"m": metric}, **options),
            get_synced_metric(metric, **options),
            get_synced_metric_collection({"m": metric}, **options),
            get_synced_state_dict(metric, **options),
            get_synced_state_dict_collection({"m": metric}, **options),
        ]
        if rank == recipient:
            same(got[:2], [expected.compute(), {"m": expected.compute()}])
            same([got[2].compute(), got[3]["m"].compute()], [expected.compute()] * 2)
            same(got[4:], [expected.state_dict(), {"m": expected.state_dict()}])
        else:
            assert got == [None, None, None, None, {}, None]
    large = evaluation.Cat()
    large.update(torch.full((100_000,), float(rank)))
    got = sync_and_compute(large, recipient_rank=1)
    assert got is None if rank != 1 else got[::100_000].tolist() == [0, 1, 2]


class Kinds(evaluation.Metric):
    """A metric with a state of every kind, also of those that only other versions of torcheval have."""

    def __init__(self):
        super().__init__()
        self._add_state("total", torch.tensor(0.0))
        self._add_state("rows", [])
        self._add_state("by_name", defaultdict(lambda: torch.tensor(0.0)))
        self._add_state("count", 0)
        self._add_state("seconds", 0.0)
        self.latest = deque(maxlen=5)

    def state_dict(self):
        return super().state_dict() | {"latest": copy.copy(self.latest)}

    @torch.inference_mode()
    def update(self, name, *numbers):
        for number in numbers:
            self.total += number
            self.rows.append(torch.full((number,), number))
            self.by_name[name] += number
            self.count, self.seconds = self.count + 1, self.seconds + 0.5
            self.latest.append(torch.tensor(number))
        return self

    @torch.inference_mode()
    def merge_state(self, metrics):
        for metric in metrics:
            self.total, self.rows = self.total + metric.total, self.rows + metric.rows
            for name, value in metric.by_name.items():
                self.by_name[name] += value
            self.count, self.seconds = self.count + metric.count, max(self.seconds, metric.seconds)
            self.latest.extend(metric.latest)
        return self

    def compute(self):
        rows, latest = [row.tolist() for row in self.rows], [int(each) for each in self.latest]
        names = {name: float(value) for name, value in sorted(self.by_name.items())}
        return float(self.total), rows, names, self.count, self.seconds, latest


@distributed(world_size=(1, 2, 3))
def test_states_of_every_kind(rank, world_size):
    """The names of the dict are others on each rank, of which torcheval's own toolkit makes wrong ones."""
    mine, every = Kinds(), [Kinds() for _ in range(world_size)]
    for each, metrics in [(rank, [mine]), *((r, [every[r]]) for r in range(world_size))]:
        for metric in metrics:
            metric.update(f"rank {each}", *range(each + 1)).update("all", 2)
    expected = every[0].merge_state(every[1:])
    assert sync_and_compute(mine) == expected.compute()
    assert len(sync_and_compute(mine)[-1]) == min(5, sum(range(2, world_size + 2)))
    synced = get_synced_metric(mine)
    assert synced.update("new", 7).compute() == expected.update("new", 7).compute()
    assert "new" not in mine.by_name
    mine.reset()
    assert sync_and_compute(mine.update("after", 1))[2] == {"after": float(world_size)}


@distributed(world_size=3)
def test_a_group_of_some_ranks(rank):
    group = torch.distributed.new_group([1, 2])
    if rank:
        metric = evaluation.Sum().update(torch.tensor(float(rank)))
        assert sync_and_compute(metric, group) == 3
        assert sync_and_compute(metric, process_group=group, recipient_rank=0) == (3 if rank == 1 else None)


@distributed(world_size=2)
def test_faults_are_those_of_all_ranks(rank):
    metric = filled("Mean", rank)
    with pytest.raises((TypeError, RemoteError), match="sync_and_compute: takes metrics of torcheval, got int"):
        sync_and_compute(3 if rank else metric)
    with pytest.raises((TypeError, RemoteError), match="takes metrics of torcheval by name, got Mean"):
        sync_and_compute_collection(metric if rank else {"a": metric})
    with pytest.raises(DisagreementError, match=r"Max\(max\)"):
        sync_and_compute(evaluation.Max() if rank else metric)
    with pytest.raises(DisagreementError, match="b: Mean"):
        sync_and_compute_collection({"b" if rank else "a": metric})
    with pytest.raises(DisagreementError, match="dst"):
        sync_and_compute(metric, recipient_rank=rank)
    for wrong, said in ((2, "recipient_rank=2 is not a rank of the group"), ("any", "recipient_rank='any' is neither")):
        with pytest.raises((ValueError, RemoteError), match=said):
            get_synced_metric(metric, recipient_rank=wrong)
    same(sync_and_compute(metric), merged("Mean", 2).compute())


@quiet()
def test_one_process_without_a_group():
    for name in METRICS:
        same(sync_and_compute(filled(name, 0)), filled(name, 0).compute())
    assert not torch.distributed.is_initialized()
