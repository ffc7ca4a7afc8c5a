"""torchmetrics' metrics over all ranks: the values of one process and of their own sync, in one exchange."""

import contextlib
import operator
import pickle
import warnings

import pytest
import torch
from counting import exchanges, recorded

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.slow  # torchmetrics takes seconds to load

from torchmetrics import MetricCollection, aggregation, classification, regression, retrieval, text, wrappers  # noqa: E402

CLASSES, LABELS = 4, {"num_classes": 4}


def scores(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, CLASSES, generator=generator)
    return logits.softmax(-1), torch.randint(0, CLASSES, (rows,), generator=generator)


def values(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(rows, generator=generator)
    return target + 0.5 * torch.randn(rows, generator=generator), target


def one(rows, seed):
    return (values(rows, seed)[0],)


def pairs(rows, seed):
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "it", "rained", "all", "day"]
    said = [" ".join(words[(i + seed) % 4 : 5 + (3 * i + seed) % 6]) for i in range(rows)]
    return said, [[" ".join(words[(i + seed) % 3 : 6 + (i + seed) % 5])] for i in range(rows)]


def flat_pairs(rows, seed):
    said, references = pairs(rows, seed)
    return said, [reference[0] for reference in references]


def queries(rows, seed):
    prediction, target = values(rows, seed)
    return prediction, target > 0, torch.arange(rows) // 3 + 10 * seed


def tokens(rows, seed):
    logits, target = scores(rows, seed)
    return logits[None], target[None]


METRICS = {
    "accuracy": (lambda **o: classification.MulticlassAccuracy(**LABELS, **o), scores),
    "auroc": (lambda **o: classification.MulticlassAUROC(**LABELS, **o), scores),
    "auroc in bins": (lambda **o: classification.MulticlassAUROC(**LABELS, thresholds=20, **o), scores),
    "average precision": (lambda **o: classification.MulticlassAveragePrecision(**LABELS, **o), scores),
    "bleu": (text.BLEUScore, pairs),
    "cat": (aggregation.CatMetric, one),
    "confusion matrix": (lambda **o: classification.MulticlassConfusionMatrix(**LABELS, **o), scores),
    "f1": (lambda **o: classification.MulticlassF1Score(**LABELS, **o), scores),
    "max": (aggregation.MaxMetric, one),
    "mean": (aggregation.MeanMetric, one),
    "mean squared error": (regression.MeanSquaredError, values),
    "pearson": (regression.PearsonCorrCoef, values),
    "perplexity": (text.Perplexity, tokens),
    "r2": (regression.R2Score, values),
    "retrieval map": (retrieval.RetrievalMAP, queries),
    "rouge": (lambda **o: text.ROUGEScore(rouge_keys=("rouge1", "rougeL"), **o), flat_pairs),
    "spearman": (regression.SpearmanCorrCoef, values),
    "word error rate": (text.WordErrorRate, flat_pairs),
}


def quietly(make, **options):
    """A metric; several warn that they keep all data, which is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**options)


def filled(make, data, rank, batches=None, **options):
    """A metric that has seen this rank's data: another number of rows, and unless told of batches, on each rank."""
    metric = quietly(make, **options)
    for batch in range(batches or 1 + rank):
        metric.update(*data(7 + rank, 10 * rank + batch))
    return metric


def alone(make, data, size):
    """The value of one process that has seen all of it."""
    metric = quietly(make, sync_on_compute=False)
    for rank in range(size):
        for batch in range(1 + rank):
            metric.update(*data(7 + rank, 10 * rank + batch))
    return metric.compute()


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@contextlib.contextmanager
def collectives():
    """The calls of ``torch.distributed`` that torchmetrics makes."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("barrier", "all_gather", "all_gather_object"):
            function = getattr(torch.distributed, name)
            patch.setattr(
                torch.distributed, name, lambda *a, _f=function, _n=name, **k: (made.append(_n), _f(*a, **k))[1]
            )
        yield made


@pytest.mark.parametrize("name", METRICS)
@distributed(world_size=2)
def test_a_metric_is_that_of_one_process_in_one_exchange(rank, name):
    make, data = METRICS[name]
    metric = filled(make, data, rank)
    expected = alone(make, data, 2)
    before = {state: getattr(metric, state) for state in metric._defaults}
    with collectives() as made:
        assert len(exchanges(lambda: same(easydist.metrics.sync_dist(metric), expected))) <= 2
        with recorded() as after:
            same(metric.compute(), expected)
        assert (made, after) == ([], [])
    assert all(getattr(metric, state) is value for state, value in before.items()), "the rank keeps its own states"
    metric.update(*data(3, 99))
    assert metric._computed is None


@pytest.mark.parametrize(
    "name", sorted(METRICS.keys() - {"rouge"})
)  # a list as long as the data, on which theirs hangs
@distributed(world_size=2)
def test_dist_sync_fn_is_torchmetrics_own_sync_in_fewer_collectives(rank, name):
    make, data = METRICS[name]
    with collectives() as theirs:
        expected = filled(make, data, rank, batches=1).compute()  # theirs hangs where lists differ in length
    ours = {"batches": 1, "dist_sync_fn": easydist.metrics.dist_sync_fn}
    filled(make, data, rank, **ours).compute()  # connects
    with collectives() as made, recorded() as operations:
        same(filled(make, data, rank, **ours).compute(), expected)
    assert made == []
    assert 1 <= len(operations) <= 2 <= len(theirs)


@distributed(world_size=3)
def test_a_rank_may_have_no_data(rank):
    for name, (make, data) in METRICS.items():
        metric, whole = quietly(make), quietly(make, sync_on_compute=False)
        for batch in range(2):
            whole.update(*data(20, batch))
            if rank == 1:
                metric.update(*data(20, batch))
        same(easydist.metrics.sync_dist(metric), whole.compute())
        assert metric.update_count == 2 * (rank == 1), name


@distributed(world_size=2)
def test_dist_sync_fn_where_a_rank_has_no_data_keeps_the_dtype(rank):
    metric = classification.MulticlassAUROC(**LABELS, dist_sync_fn=easydist.metrics.dist_sync_fn)
    if rank:
        metric.update(*scores(6, 0))
    else:
        metric._update_count = 1  # without a warning
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
        assert (metric.preds.shape, metric.target.dtype) == ((6, CLASSES), torch.int64)


@pytest.mark.parametrize(
    "access",
    [
        list,
        lambda found: found.copy(),
        lambda found: pickle.loads(pickle.dumps(found)),
        lambda found: operator.add(found, []),
        lambda found: operator.add([], found),
        lambda found: found * 1,
        reversed,
    ],
    ids=["list", "copy", "pickle", "add", "radd", "mul", "reversed"],
)
def test_any_access_to_the_tensors_of_all_ranks_gathers_them(access):
    (found,) = access(easydist.metrics.dist_sync_fn(torch.ones(2)))
    assert found.tolist() == [1.0, 1.0]


@distributed(world_size=2)
def test_dist_sync_fn_notices_a_state_that_changes_before_it_travels(rank):
    state = torch.ones(2)
    result = easydist.metrics.dist_sync_fn(state)
    if rank:
        state.zero_()
    with pytest.raises((ValueError, RemoteError), match="dist_sync_fn: a state has changed since the call"):
        len(result)
    del result  # further states would travel with it
    with torch.inference_mode():
        state = torch.full((2,), float(rank))
        result = easydist.metrics.dist_sync_fn(state)
        state.fill_(5)
        assert [each.tolist() for each in result] == [[0.0, 0.0], [1.0, 1.0]]


def collection(**options):
    kinds = [METRICS[name] for name in ("accuracy", "auroc", "average precision", "confusion matrix", "f1")]
    return MetricCollection([make(**options) for make, data in kinds])


@distributed(world_size=2)
def test_a_collection_is_one_exchange(rank):
    metrics = filled(collection, scores, rank)
    expected = alone(collection, scores, 2)
    with collectives() as made:
        operations = exchanges(lambda: same(easydist.metrics.sync_dist(metrics), expected))
        same(metrics.compute(), expected)
        assert operations == ["header"]
        assert made == []
    with collectives() as theirs:
        same(filled(collection, scores, rank).compute(), expected)
    assert len(theirs) >= 10
    metrics.update(*scores(4, 50))
    metrics.reset()
    metrics.update(*scores(20, rank))
    same(easydist.metrics.sync_dist(metrics), filled_twice(collection))


def filled_twice(make):
    whole = quietly(make, sync_on_compute=False)
    for seed in range(2):
        whole.update(*scores(20, seed))
    return whole.compute()


@distributed(world_size=2)
def test_wrappers_and_sums_of_metrics(rank):
    kinds = {
        "classes": lambda **o: wrappers.ClasswiseWrapper(
            classification.MulticlassAccuracy(**LABELS, average=None, **o)
        ),
        "extremes": lambda **o: wrappers.MinMaxMetric(classification.MulticlassAccuracy(**LABELS, **o)),
        "sum": lambda **o: METRICS["accuracy"][0](**o) + METRICS["f1"][0](**o),
        "nested": lambda **o: MetricCollection({"a": collection(**o), "b": METRICS["accuracy"][0](**o)}),
    }
    for name, make in kinds.items():
        metric = filled(make, scores, rank)
        with collectives() as made:
            same(easydist.metrics.sync_dist(metric), alone(make, scores, 2))
            metric.compute()
        assert (name, made) == (name, [])


@distributed(world_size=2)
def test_more_data_after_a_sync(rank):
    metric = METRICS["pearson"][0]()
    whole = METRICS["pearson"][0](sync_on_compute=False)
    for step in range(3):
        for r in range(2):
            whole.update(*values(5, 10 * step + r))
        metric.update(*values(5, 10 * step + rank))
        same(easydist.metrics.sync_dist(metric), whole.compute())


@distributed(world_size=2)
def test_lists_without_a_reduction_may_differ_in_length(rank):
    class Boxes(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("boxes", [], dist_reduce_fx=None)

        def update(self, *boxes):
            self.boxes.extend(boxes)

        def compute(self):
            return sorted(tuple(box.shape) for box in self.boxes)

    metric = Boxes()
    metric.update(*[torch.zeros(1 + i, 4) for i in range(3 * rank)])
    assert easydist.metrics.sync_dist(metric) == [(1, 4), (2, 4), (3, 4)]


def detections(rank, kind):
    """Boxes or masks of another number of images on each rank; some have none."""
    generator = torch.Generator().manual_seed(rank)
    found, true = [], []
    for i in range(3 + 2 * rank):
        corner, count = 50 * torch.rand(i % 4, 2, generator=generator), i % 4
        shapes = {
            "boxes": torch.cat([corner, corner + 5 + 9 * torch.rand(count, 2, generator=generator)], dim=1),
            "masks": torch.rand(count, 16, 16, generator=generator) > 0.3,
        }
        labels = torch.randint(0, 2, (count,), generator=generator)
        true.append({kind: shapes[kind], "labels": labels})
        moved = shapes[kind].roll(1, -1) if kind == "masks" else shapes[kind] + 1
        found.append({kind: moved, "scores": torch.rand(count, generator=generator), "labels": labels})
    return found, true


@pytest.mark.parametrize(("kind", "iou"), [("boxes", "bbox"), ("masks", "segm")])
@distributed(world_size=2)
def test_mean_average_precision(rank, kind, iou):
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # the latter: PyPI has it for torch with CUDA only
        pytest.skip(f"torchvision does not run with this build of torch: {error}")
    pytest.importorskip("pycocotools")
    from torchmetrics.detection import MeanAveragePrecision

    metric = quietly(MeanAveragePrecision, iou_type=iou)
    whole = quietly(MeanAveragePrecision, iou_type=iou, sync_on_compute=False)
    metric.update(*detections(rank, kind))
    for each in range(2):
        whole.update(*detections(each, kind))
    with collectives() as made:
        same(easydist.metrics.sync_dist(metric), whole.compute())
    assert made == []


@distributed(world_size=2)
def test_a_metric_that_keeps_no_value_is_computed_without_a_collective_too(rank):
    make, data = METRICS["auroc"]
    metric = filled(make, data, rank, compute_with_cache=False)
    with collectives() as made:
        same(easydist.metrics.sync_dist(metric), alone(make, data, 2))
        same(metric.compute(), alone(make, data, 2))
    assert made == []
    assert metric.compute_with_cache is False


class Exact:
    """A metric in the way of Hugging Face evaluate."""

    def compute(self, predictions, references):
        return {"exact_match": sum(map(str.__eq__, predictions, references)) / len(references)}


@distributed(world_size=2)
def test_gathered_samples_are_what_functions_of_other_libraries_take(rank):
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = scores(11, 0)
    mine = slice(6 * rank, 6 + 5 * rank)
    said, references = flat_pairs(11, 0)
    columns = {
        "said": said[mine],
        "references": references[mine],
        "labels": labels[mine],
        "logits": logits[mine].numpy(),
    }
    every = easydist.gather_for_metrics(columns, total=11)
    expected = sklearn.roc_auc_score(labels, logits, multi_class="ovr")
    assert sklearn.roc_auc_score(every["labels"], every["logits"], multi_class="ovr") == expected
    assert Exact().compute(every["said"], every["references"]) == Exact().compute(said, references)


@distributed(world_size=2)
def test_faults_are_those_of_all_ranks(rank):
    metric = filled(*METRICS["mean"], rank)
    with pytest.raises(RemoteError, match="TypeError: sync_dist: takes a Metric or a MetricCollection, got int"):
        easydist.metrics.sync_dist(3 if rank else metric)
    with pytest.raises(DisagreementError, match="MaxMetric"):
        easydist.metrics.sync_dist(METRICS["max"][0]() if rank else metric)
    running = wrappers.Running(aggregation.SumMetric(), 2)
    with pytest.raises(RemoteError, match="Running"):
        easydist.metrics.sync_dist(metric if rank else running)
    metric.sync()
    with pytest.raises(ValueError, match=r"synced already; call its unsync\(\)"):
        easydist.metrics.sync_dist(metric)
    metric.unsync()
    same(easydist.metrics.sync_dist(metric), alone(*METRICS["mean"], 2))


def test_one_process_without_a_group():
    for make, data in METRICS.values():
        same(easydist.metrics.sync_dist(filled(make, data, 0)), alone(make, data, 1))
    assert not torch.distributed.is_initialized()
