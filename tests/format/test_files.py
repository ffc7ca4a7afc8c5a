"""Laws of trees on disk: what is saved is loaded, whole or not at all, and only what was checked."""

import itertools
import os
import resource
import signal
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import launching
import numpy as np
import pytest
import resident
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from trees import CASES, DTYPES, OUTSIDERS, Batch, Point, arrays, assert_same, bits, numbers, tensors

import easydist
from easydist import tree

PROPERTY = settings(max_examples=launching.examples(60))
PLAIN_KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.binary(max_size=2)
REFUSED = {"enum", "int enum", "object", "class", "function", "set", "odd keys", "statics", "registered"}
PLAINER = {  # what comes back as another class
    "parameter": torch.Tensor,
    **dict.fromkeys(("array >i4", "array >f8"), np.ndarray),
    **dict.fromkeys(("namedtuple", "namedtuple with its own __new__", "deep"), dict),
    **{name: dict for name in CASES if "dataclass" in name},
    **dict.fromkeys(("empty defaultdict", "default dict", "dict subclass", "counter", "mapping proxy"), dict),
    **dict.fromkeys(("empty UserDict", "user dict", "frozen mapping", *OUTSIDERS), dict),
    **dict.fromkeys(("empty deque", "deque", "list subclass"), list),
    **dict.fromkeys(("return type", "tuple subclass"), tuple),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


def made(name):
    if name in OUTSIDERS:
        pytest.importorskip("tensordict" if name == "TensorDict" else "transformers")
    return CASES[name]()


def test_a_path_may_be_bytes(path):
    easydist.save({"a": 1}, os.fsencode(path))
    assert easydist.load(os.fsencode(path)) == {"a": 1}


def saved_and_loaded(data, path):
    easydist.save(data, path)
    return easydist.load(path)


def leaf_bits(data):
    return [bits(v) if isinstance(v, torch.Tensor | np.ndarray) else repr(v) for v in tree.leaves(data)]


def native(leaf):
    return leaf.astype(leaf.dtype.newbyteorder("=")) if isinstance(leaf, np.ndarray) else leaf


# --- what is saved is loaded


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED and name not in PLAINER])
def test_load_is_the_inverse_of_save(name, path):
    assert_same(saved_and_loaded(made(name), path), made(name))


@pytest.mark.parametrize("name", PLAINER)
def test_other_classes_come_back_as_plain_containers_of_the_same_leaves(name, path):
    data = made(name)
    got = saved_and_loaded(data, path)
    assert type(got) is PLAINER[name]
    assert leaf_bits(got) == leaf_bits(tree.map(native, data))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_json_cannot_hold_is_refused_with_its_path_and_no_file(name, path):
    with pytest.raises(TypeError, match=r"\['x'\].* is an? \w+; a file holds tensors, arrays, numbers, text"):
        easydist.save({"x": CASES[name]()}, path)
    assert not list(path.parent.iterdir())


plain = st.recursive(
    tensors(max_dims=2, max_side=2) | arrays() | numbers() | st.integers() | st.text(max_size=3) | st.none(),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(PLAIN_KEYS | st.tuples(PLAIN_KEYS), child, max_size=3),
        st.dictionaries(PLAIN_KEYS, child, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def nested_key(depth):
    return (nested_key(depth - 1),) if depth else 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"a": {2**13000: 1}}, r"\['a'\] could not be read again: the structure has a key of 13001 bits"),
        ({nested_key(101): 1}, "the tree could not be read again: the structure has a key nested deeper than 100"),
        (dict.fromkeys(itertools.product((-1, -2), repeat=7), 1), "more than 100 keys .* have the same hash"),
        ({"a": torch.empty(0, 2**59)}, r"a has the shape \(0, 576460752303423488\), which is too large"),
    ],
    ids=["long key", "deep key", "equal hashes", "large shape"],
)
def test_what_load_would_refuse_is_refused_and_no_file(path, data, text):
    with pytest.raises(ValueError, match=text):
        easydist.save(data, path)
    assert not path.exists()


def test_the_largest_of_what_load_reads_is_saved(path):
    data = {2**12999: 1, nested_key(100): torch.empty(0, 2**58)}
    easydist.save(data, path)
    assert_same(easydist.load(path), data)


@pytest.mark.slow
@PROPERTY
@given(plain)
def test_plain_trees_come_back_bit_for_bit(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "plain.safetensors"
    assert_same(saved_and_loaded(data, path), tree.map(native, data))
    safetensors.torch.load_file(path)


@pytest.mark.parametrize("number", [2**200, -(2**63) - 1, float("-inf"), -0.0, 5e-324, complex(-0.0, float("nan"))])
def test_every_python_number_comes_back_as_it_was(number, path):
    assert repr(saved_and_loaded([number, {number: 1}], path)) == repr([number, {number: 1}])


@pytest.mark.parametrize("text", ["\ud83d\ude00", "😀", "\ude00-\ud83d", "\ud83d", "é\ud83d\ude00é"], ids=ascii)
def test_text_comes_back_as_it_was_though_json_joins_surrogates(path, text):
    data = {"x": [text, text.encode("utf-8", "surrogatepass")], text: 1, (text, 1): 2, "😀": torch.ones(1)}
    assert_same(saved_and_loaded(data, path), data)
    assert [*saved_and_loaded({text: torch.ones(1), "x": text}, path)] == [text, "x"]


def test_names_are_the_paths_of_the_leaves(path):
    data = {"layer": {"weight": torch.ones(2)}, 3: [np.zeros(1), Point(torch.ones(1), 5)], "n": 1}
    easydist.save(data, path)
    want = [p for p, leaf in zip(tree.flatten(data)[1].paths, tree.leaves(data), strict=True) if type(leaf) is not int]
    assert sorted(safetensors.torch.load_file(path)) == sorted(want) == ["['layer']['weight']", "[3][0]", "[3][1].x"]


def test_ties_are_stored_once_and_tied_again(path):
    weight, array = torch.arange(1000.0), np.arange(1000.0)
    same_memory = weight.detach()
    got = saved_and_loaded({"a": weight, "b": [weight], "c": same_memory, "d": array, "e": (array,)}, path)
    assert got["a"] is got["b"][0] is got["c"]
    assert got["d"] is got["e"][0]
    assert path.stat().st_size < 4000 + 8000 + 1000


def test_other_views_of_one_memory_are_stored_for_themselves(path):
    z = torch.tensor([[1 + 2j, 3], [4, 5]])
    data = {"z": z, "t": z.t(), "conj": z.conj(), "row": z[0], "re": z.real, "bits": z.view(torch.int64)}
    assert_same(saved_and_loaded(data, path), data)


class Made(Mapping):
    """A mapping that creates its values on each access, as a lazily loaded one does."""

    def __init__(self, make, start):
        self.make, self.numbers = make, range(start, start + 4)

    def __getitem__(self, key):
        return self.make(key)

    def __iter__(self):
        return iter(self.numbers)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda key: torch.full((3,), complex(key, 1)).conj(), lambda key: torch.full((3,), complex(key, -1))),
        (lambda key: np.full(3, key, ">i4"), lambda key: np.full(3, key, "i4")),
    ],
    ids=["conjugate", "big-endian"],
)
def test_values_that_a_mapping_makes_when_it_is_read_are_not_taken_for_one_another(path, make, plain):
    easydist.save([Made(make, 4 * i) for i in range(30)], path)
    assert_same(easydist.load(path), [dict(Made(plain, 4 * i)) for i in range(30)])


def test_a_state_dict_comes_back(path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    got = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert got["model"]["0.weight"] is got["model"]["2.weight"]
    assert_same(got, {"model": OrderedDict(model.state_dict()), "optimizer": optimizer.state_dict()})
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    other.load_state_dict(got["model"])
    torch.optim.Adam(model.parameters()).load_state_dict(got["optimizer"])
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


# --- other writers and readers


def test_a_plain_safetensors_file_is_a_flat_dict(path):
    values = {str(d): torch.tensor([0, 1, 1]).to(d) for d in DTYPES if d is not torch.complex128}
    safetensors.torch.save_file(values, path, {"format": "pt"})
    assert_same(dict(sorted(easydist.load(path).items())), dict(sorted(values.items())))
    assert easydist.load_metadata(path) == {"format": "pt"}


def test_metadata_is_kept_for_every_reader(path):
    easydist.save([torch.ones(1)], path, {"format": "pt", "é": "ü"})
    assert easydist.load_metadata(path) == {"format": "pt", "é": "ü"}
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata().items() >= {"format": "pt", "é": "ü"}.items()


def test_metadata_of_ours_and_of_other_types_is_refused(path):
    with pytest.raises(ValueError, match=r"keys that begin with 'easydist\.' are reserved, got 'easydist\.tree'"):
        easydist.save([], path, {"easydist.tree": "x"})
    with pytest.raises(TypeError, match=r"metadata has to be a dict of str to str, got \{'a': 1\}"):
        easydist.save([], path, {"a": 1})
    assert not list(path.parent.iterdir())


# --- in place


def test_into_writes_tensors_and_arrays_in_place_and_returns_the_tree(path):
    data = {"a": torch.arange(6.0).view(2, 3), "b": Batch(np.arange(3), "x"), "p": Point(torch.ones(2), 7), "n": 0.5}
    easydist.save(data, path)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    into = {"p": Point(torch.zeros(2), 0), "b": Batch(np.zeros(3, int), "y"), "a": parameter.t(), "n": 0.0}
    got = easydist.load(path, into=into)
    assert parameter.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert got["b"].ids is into["b"].ids
    assert (got["b"].ids.tolist(), got["b"].name, got["p"].x.tolist(), got["p"].y, got["n"]) == (
        *([0, 1, 2], "y", [1, 1], 7, 0.5),
    )


@pytest.mark.parametrize("name", [n for n in CASES if n not in REFUSED and n not in ("expanded", "read-only array")])
def test_into_fills_every_class_that_can_be_saved(name, path):
    if name == "broadcast array":
        pytest.skip("is read-only")
    data = made(name)
    easydist.save(data, path)
    into = made(name)
    for leaf in tree.leaves(into):
        if isinstance(leaf, torch.Tensor):
            leaf.detach().zero_()
        elif isinstance(leaf, np.ndarray):
            leaf[...] = 0
    assert leaf_bits(easydist.load(path, into=into)) == leaf_bits(data)
    assert type(easydist.load(path, into=into)) is type(data)


def test_into_takes_a_plain_file(path):
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    into = {"w": torch.zeros(2)}
    easydist.load(path, into=into)
    assert into["w"].tolist() == [1, 1]


def test_into_of_other_leaves_is_refused_and_untouched(path):
    easydist.save({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1), "n": 1, "e": torch.ones(1)}, path)
    into = {
        "a": torch.zeros(4),
        "b": torch.zeros(2, dtype=torch.int32),
        "d": np.zeros(1),
        "n": 1.0,
        "e": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="into= differ in") as caught:
        easydist.load(path, into=into)
    assert str(caught.value).splitlines() == [
        f"load: {path} and into= differ in 5 of 6 leaves",
        "  ['a']  file: float32 (3,)   into: float32 (4,)",
        "  ['b']  file: float32 (2,)   into: int32 (2,)",
        "  ['c']  file: float32 (1,)   into: missing",
        "  ['d']  file: missing   into: float64 (1,)",
        "  ['n']  file: int   into: float",
        "Pass the structure, dtypes and shapes of the file, or load without into=.",
    ]
    assert not any(leaf.any() for leaf in into.values() if not isinstance(leaf, float))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (np.broadcast_to(np.zeros(1, np.float32), 2), r"leaf \['b'\] is a read-only array \(pass a copy\)"),
        (torch.zeros(1).expand(2), r"leaf \['b'\] is an expanded tensor"),
    ],
)
def test_into_that_cannot_be_written_is_refused_and_untouched(path, target, text):
    easydist.save({"a": torch.ones(2), "b": torch.ones(2)}, path)
    into = {"a": torch.zeros(2), "b": target}
    with pytest.raises(ValueError, match=text):
        easydist.load(path, into=into)
    assert not into["a"].any()


def test_into_with_ties_that_the_file_lacks_is_refused_and_untouched(path):
    easydist.save([torch.ones(2), torch.zeros(2) + 2], path)
    tied = torch.zeros(2)
    for other in (tied, tied.detach()):  # as in a state_dict()
        with pytest.raises(ValueError, match=r"\[0\] and \[1\] are one tensor in into=, but two in the file"):
            easydist.load(path, into=[tied, other])
    assert not tied.any()


# --- whole or not at all


def test_a_file_in_use_keeps_its_values_when_it_is_replaced(path):
    first = saved_and_loaded({"a": torch.zeros(5000)}, path)
    easydist.save({"a": first["a"] + 1}, path)
    first["a"] += 2
    assert (first["a"].sum(), easydist.load(path)["a"].sum()) == (10000, 5000)
    easydist.save(easydist.load(path), path)
    assert easydist.load(path)["a"].sum() == 5000


def test_a_link_stays_a_link_and_the_mode_is_that_of_new_files(path):
    link = path.parent / "latest"
    link.symlink_to(path.name)
    easydist.save([1], link)
    assert link.is_symlink()
    (other := path.parent / "other").touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path):
    easydist.save({"a": 1}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'$"):
            easydist.save({"a": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert easydist.load(path) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_a_crash_in_the_middle_leaves_the_old_file(path):
    easydist.save({"a": 1}, path)
    script = (
        "import easydist, resource, signal, sys, torch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process in the middle of a write\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "easydist.save({'a': torch.ones(100_000)}, sys.argv[1])\n"
    )
    launching.python("-c", script, path, status=-signal.SIGXFSZ)
    assert easydist.load(path) == {"a": 1}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
def test_neither_saving_nor_loading_copies_the_data(path):
    data = {"a": torch.ones(10_000_000), "b": np.ones(5_000_000)}
    before = resident.own()
    easydist.save(data, path)
    got = easydist.load(path)
    total = float(got["a"].sum()) + float(got["b"].sum())
    assert total == 15_000_000
    assert resident.own() - before < 20_000_000  # the data are 80 MB
    easydist.load(path, into=data)
    assert resident.own() - before < 20_000_000


def test_a_file_and_then_its_name_are_on_the_disk(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def named(source, target):
        assert done == [os.fspath(source)]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    easydist.save({"x": torch.ones(2)}, tmp_path / "file")
    assert done[1:] == [str(tmp_path)]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_save_that_ends_early_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    def ends(descriptor):
        raise error

    easydist.save({"x": torch.ones(2)}, path := tmp_path / "file")
    monkeypatch.setattr(os, "fsync", ends)
    with pytest.raises(error):
        easydist.save({"x": torch.zeros(2)}, path)
    assert [*tmp_path.iterdir()] == [path]
    assert_same(easydist.load(path), {"x": torch.ones(2)})
