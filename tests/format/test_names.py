"""Laws of names in files: other programs find what they look for, and ``load`` finds everything again."""

import collections
import dataclasses
import json
from pathlib import Path

import accelerate
import launching
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from trees import assert_same

import easydist

BEFORE = Path(__file__).parent / "written_before"


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: int


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def names_in(path):
    return set(safetensors.torch.load_file(path))


class Tied(nn.Module):
    """Tied weights, of which the first in the state dict is not the first in the alphabet; and a buffer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.again = nn.Linear(3, 5, bias=False)
        self.again.weight = self.head.weight
        self.third = nn.Linear(3, 5, bias=False)
        self.third.weight = self.head.weight


# --- flat mappings


def test_a_state_dict_has_the_names_the_metadata_and_the_ties_that_safetensors_writes(path, tmp_path):
    model = Tied()
    easydist.save(model.state_dict(), path)
    safetensors.torch.save_model(model, tmp_path / "theirs")
    with safetensors.safe_open(path, "pt") as ours, safetensors.safe_open(tmp_path / "theirs", "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        assert ours.metadata().items() >= {"format": "pt", **theirs.metadata()}.items()
        assert theirs.metadata() == {"head.weight": "again.weight", "third.weight": "again.weight"}
    for name, value in safetensors.torch.load_file(path).items():
        assert torch.equal(value, model.state_dict()[name])
    assert easydist.load_metadata(path) == {"format": "pt", **easydist.load_metadata(tmp_path / "theirs")}


def test_a_state_dict_comes_back_with_its_class_its_order_and_its_ties(path):
    state = Tied().state_dict()
    easydist.save(state, path)
    got = easydist.load(path)
    assert_same(got, collections.OrderedDict(state))
    assert got["head.weight"] is got["again.weight"] is got["third.weight"]


@pytest.mark.slow
def test_other_libraries_load_it_strictly(path):
    model = Tied()
    easydist.save(model.state_dict(), path)
    for load in (
        lambda target: safetensors.torch.load_model(target, path, strict=True),
        lambda target: target.load_state_dict(easydist.load(path)),
        lambda target: easydist.load(path, into=target.state_dict()),
        lambda target: accelerate.load_checkpoint_in_model(target, str(path), strict=True),
        lambda target: accelerate.load_checkpoint_in_model(target, str(path.parent)),
    ):
        target = Tied()
        load(target)
        assert_same(target.state_dict(), model.state_dict())


def test_metadata_of_the_user_goes_before_that_of_safetensors(path):
    x = torch.ones(1)
    easydist.save({"a": x, "b": x}, path, {"format": "np", "b": "mine"})
    assert easydist.load_metadata(path) == {"format": "np", "b": "mine"}
    got = easydist.load(path)
    assert got["a"] is got["b"]


@pytest.mark.parametrize(
    "data",
    [
        {"a": torch.ones(1), "n": 1},
        {"a": torch.ones(1), "b": np.ones(1)},
        {"a": torch.ones(1), 1: torch.ones(1)},
        {"a": torch.ones(1), "b": {"c": torch.ones(1)}},
        {"a": [torch.ones(1)]},
        [torch.ones(1)],
        {"a": torch.ones(1), "b": None},
        {"a": {"b": torch.ones(1), "c": torch.ones(1)}, "empty": {}},
        {"a": torch.ones(1), "__metadata__": torch.ones(1)},
        {"a": torch.ones(1), "\ud800": torch.ones(1)},
    ],
    ids=str,
)
def test_any_other_tree_has_paths_for_names_and_no_further_metadata(data, path):
    easydist.save(data, path)
    assert all(name.startswith("[") for name in names_in(path))
    assert easydist.load_metadata(path) == {}
    assert_same(easydist.load(path), data)


@pytest.mark.parametrize(
    "data",
    [
        {"['a']": torch.ones(1), "a": torch.zeros(1)},
        {"a": torch.zeros(1), "['a']": torch.ones(1), "[\"['a']\"]": torch.ones(2)},
        {"": torch.ones(1), "é\n\0": torch.zeros(1), "format": torch.ones(2)},
        {"easydist.tree": torch.ones(1), "easydist.dtypes": torch.ones(2) * 1j},
        {},
    ],
    ids=str,
)
def test_names_that_look_like_something_else_stay_names(data, path):
    easydist.save(data, path)
    assert_same(easydist.load(path), data)
    assert names_in(path) == set(data)
    assert easydist.load_metadata(path) == {"format": "pt"}
    assert_same(easydist.load(path, into={name: torch.zeros_like(value) for name, value in data.items()}), data)


def test_tied_names_that_look_like_metadata_stay_names(path):
    data = dict.fromkeys(["format", "easydist.tree", "easydist.dtypes", "['a']", "a"], torch.ones(2))
    easydist.save(data, path)
    assert names_in(path) == {"['a']"}
    assert easydist.load_metadata(path) == {"a": "['a']", "format": "pt"}
    got = easydist.load(path)
    assert_same(got, data)
    assert len({id(value) for value in got.values()}) == 1


odd = st.sampled_from(["", "a", "['a']", "[0]", ".a", "a.b", "format", "easydist.tree", "__metadata__", "\ud800", "é"])


@pytest.mark.slow
@settings(max_examples=launching.examples(100))
@given(st.lists(odd | st.text(max_size=3), unique=True, max_size=6), st.data())
def test_any_flat_mapping_comes_back(tmp_path_factory, names, data):
    path = tmp_path_factory.getbasetemp() / "flat.safetensors"
    values = [torch.arange(float(i)) for i in range(1, 4)]
    tree = {name: data.draw(st.sampled_from(values)) for name in names}
    easydist.save(tree, path)
    got = easydist.load(path)
    assert_same(got, tree)
    assert {(a, b) for a in tree for b in tree if got[a] is got[b]} == {
        (a, b) for a in tree for b in tree if tree[a] is tree[b]
    }
    assert easydist.read_header(path) == easydist.header(tree)
    if not {"__metadata__", "\ud800"} & set(names):
        assert names_in(path) == {min(other for other in tree if tree[other] is tree[name]) for name in tree}
    into = {name: got[name].clone() * 0 for name in tree}
    assert_same(easydist.load(path, into=into), tree)


# --- names=


def nested():
    w = torch.arange(3.0)
    return {"layer": {"weight": w, "n": 1}, 3: [np.arange(2), Point(torch.ones(1), 5)], "again": (w,), "x.y": None}


def plain(tree):
    return {**tree, 3: [tree[3][0], {"x": tree[3][1].x, "y": 5}]}


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (None, {"['layer']['weight']", "[3][0]", "[3][1].x"}),
        ("dots", {"again.0", "3.0", "3.1.x"}),
        (
            lambda path: "model" + path.replace("['", ".").replace("']", ""),
            {"model.again[0]", "model[3][0]", "model[3][1].x"},
        ),
        (
            lambda path: {"[3][0]": "['layer']['weight']", "['layer']['weight']": "[3][0]"}.get(path, path),
            {"['again'][0]", "['layer']['weight']", "[3][1].x"},
        ),
    ],
    ids=["paths", "dots", "function", "swapped"],
)
def test_any_names_give_the_same_tree(names, want, path):
    easydist.save(nested(), path, names=names)
    assert names_in(path) == want
    assert easydist.load_metadata(path).get("format") == (None if names is None else "pt")
    got = easydist.load(path)
    assert_same(got, plain(nested()))
    assert got["layer"]["weight"] is got["again"][0]
    into = nested()
    into["layer"]["weight"][:] = into[3][0][:] = into[3][1].x[:] = 0
    assert_same(plain(easydist.load(path, into=into)), plain(nested()))
    assert easydist.header(nested(), names=names) == easydist.read_header(path)


def test_a_tree_named_with_dots_is_a_state_dict_to_others(path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parts = {str(i): dict(part.named_parameters()) for i, part in enumerate(model)}
    easydist.save(parts, path, names="dots")
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    safetensors.torch.load_model(other, path)
    assert_same(other.state_dict(), model.state_dict())


def test_flat_names_can_be_changed_to_paths(path):
    easydist.save({"b": torch.ones(1), "a": torch.zeros(1)}, path, names=lambda path: path)
    assert names_in(path) == {"['a']", "['b']"}
    assert_same(easydist.load(path), {"b": torch.ones(1), "a": torch.zeros(1)})


def test_names_that_clash_are_all_named_with_both_paths_before_a_file_exists(path):
    tree = {"a": {"b": torch.ones(1), "c": 5}, "a.b": torch.ones(2), 1: np.ones(1), "1": torch.ones(1), "a.c": 5}
    with pytest.raises(ValueError, match="names= gives several tensors the same name") as caught:
        easydist.save(tree, path, names="dots")
    assert str(caught.value).splitlines()[1:-1] == ["  '1': [1] and ['1']", "  'a.b': ['a']['b'] and ['a.b']"]
    with pytest.raises(ValueError, match=r"'x': \['a'\]\['b'\] and \['a\.b'\] and \[1\] and \['1'\]"):
        easydist.save(tree, path, names=lambda path: "x")
    x = torch.ones(1)
    with pytest.raises(ValueError, match=r"'x': \['a'\] and \['b'\]"):  # tied, but two names nevertheless
        easydist.header({"a": x, "b": x}, names=lambda path: "x")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ("slashes", ValueError, "names='slashes' is neither 'dots' nor a function from paths to names"),
        (5, ValueError, "names=5 is neither 'dots' nor a function"),
        (lambda path: 5, TypeError, r"names= gives \['a'\] the name 5, which is not text"),
        (lambda path: "__metadata__", ValueError, r"names= gives \['a'\] the name '__metadata__', which a file cannot"),
        (lambda path: "\udfff", ValueError, r"names= gives \['a'\] the name '\\udfff', which a file cannot hold"),
    ],
)
def test_other_names_are_refused_before_a_file_exists(names, error, text, path):
    for call in (easydist.save, lambda tree, path, names: easydist.header(tree, names=names)):
        with pytest.raises(error, match=text):
            call({"a": torch.ones(1), "n": 5}, path, names=names)
    assert not list(path.parent.iterdir())


def test_the_depth_and_the_cycles_of_a_tree_are_refused_with_names_as_without(path):
    deep = torch.ones(1)
    for _ in range(101):
        deep = [deep]
    cycle = {}
    cycle["a"] = cycle
    for data, text in ((deep, "nested deeper than 100"), (cycle, "cycle")):
        with pytest.raises(ValueError, match=text):
            easydist.save(data, path, names="dots")


# --- files written before names were kept


def test_files_written_before_are_read_as_before():
    w = torch.arange(3.0)
    flat = {"b": torch.tensor([1, 2], dtype=torch.int16), "a": w, "tied": w}
    ordered = [("z.weight", torch.ones(1)), ("a.bias", torch.zeros(1, dtype=torch.bool))]
    want = {
        "flat": flat,
        "ordered": collections.OrderedDict(ordered),
        "awkward_keys": {"['a']": torch.ones(1), "a": torch.zeros(1), "__metadata__": torch.ones(2)},
        "nested": {
            "layer": {"weight": w},
            3: [np.arange(2), {"x": torch.ones(1), "y": 5}],
            "n": 1,
            "again": (w,),
            "none": None,
            (1, "x"): 2.5,
        },
        "tensor": torch.arange(2),
        "empty": {},
    }
    assert {file.stem for file in BEFORE.iterdir()} == set(want)
    for name, tree in want.items():
        got = easydist.load(BEFORE / f"{name}.safetensors")
        assert_same(got, tree)
    assert easydist.load_metadata(BEFORE / "ordered.safetensors") == {"format": "pt"}
    got = easydist.load(BEFORE / "flat.safetensors")
    assert got["a"] is got["tied"]
    got = easydist.load(BEFORE / "nested.safetensors")
    assert got["layer"]["weight"] is got["again"][0]
    into = {name: torch.zeros_like(value) for name, value in want["awkward_keys"].items()}
    assert_same(easydist.load(BEFORE / "awkward_keys.safetensors", into=into), want["awkward_keys"])


# --- transformers


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}


def bert(kind, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("BertModel", 23), ("BertForMaskedLM", 28)])
def test_transformers_finds_every_tensor(kind, count, path):
    model = bert(kind, 0)
    state = model.state_dict()
    assert len(state) == count
    easydist.save(state, path)
    model.config.save_pretrained(path.parent)
    torch.manual_seed(1)
    other, report = type(model).from_pretrained(path.parent, output_loading_info=True)
    assert not any(report.values())
    assert sum(torch.equal(value, other.state_dict()[name]) for name, value in state.items()) == count


@pytest.mark.slow
def test_what_transformers_saves_is_loaded(tmp_path):
    model = bert("BertModel", 0)
    model.save_pretrained(tmp_path)
    got = easydist.load(tmp_path / "model.safetensors")
    assert_same({name: got[name] for name in model.state_dict()}, dict(model.state_dict()))
    assert len(got) == 23
    other = bert("BertModel", 1)
    assert str(other.load_state_dict(got)) == "<All keys matched successfully>"


# --- what the header tells


def test_read_header_reads_files_and_bytes(path):
    tree = {"a": torch.ones(2, 3), "b": torch.arange(2) * 1j}
    easydist.save(tree, path, {"step": "3"})
    got = easydist.read_header(path)
    assert got == easydist.header(tree, {"step": "3"}) == easydist.read_header(path.read_bytes())
    assert got == easydist.read_header(bytearray(path.read_bytes())[: got.nbytes]) == easydist.read_header(str(path))
    assert {entry.name: (entry.dtype, entry.shape) for entry in got.entries} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.complex64, (2,)),
    }
    for entry in got.entries:
        data = path.read_bytes()[got.nbytes :][entry.start : entry.stop]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=entry.dtype).view(entry.shape), tree[entry.name])
    assert json.loads(got.metadata["easydist.tree"])["named"]
    assert got != easydist.header(tree)
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.nbytes = 5
    with pytest.raises(easydist.WireError):
        easydist.read_header(path.read_bytes()[:-1])
    with pytest.raises(TypeError, match="read_header takes a path or bytes, got int"):
        easydist.read_header(5)
    with pytest.raises(ValueError, match=r"header: metadata keys that begin with 'easydist\.' are reserved"):
        easydist.header(tree, {"easydist.x": ""})


def test_header_describes_what_save_refuses_with_the_same_error():
    with pytest.raises(TypeError, match=r"\['x'\] is a set; a file holds tensors"):
        easydist.header({"x": {1}})
