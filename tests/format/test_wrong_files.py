"""Trees on disk that are damaged, hostile or none: a typed error, and memory in proportion to the file."""

import contextlib
import json
import os
import random
import resource
import tracemalloc

import launching
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from trees import THING, Batch, assert_same

import easydist
from easydist import WireError
from easydist.format import header, outline

PROPERTY = settings(max_examples=launching.examples(60))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


def with_structure(path, text, **values):
    path.write_bytes(b"".join(header.chunks(values, {"easydist.tree": text})))


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ("{", "the header is not JSON"),
        ("[]", "needs 'tree' and may have 'ties'"),
        ('{"tree": 1, "x": 2}', "needs 'tree' and may have 'ties'"),
        ('{"tree": {"tensor": "a"}, "ties": 1}', "ties of the structure are not an object of strings"),
        ('{"tree": {"tensor": "a"}, "named": 1}', "'named' of the structure is not true"),
        ('{"tree": {"tensor": "c"}, "named": true}', "there is no entry 'c'"),
        ('{"tree": {"tensor": "c"}}', "there is no entry 'c'"),
        ('{"tree": {"tensor": "b"}}', "entry 'a' has no place in the structure"),
        ('{"tree": {"tensor": "a", "x": 1}}', "a node of the structure has 2 keys, not one"),
        ('{"tree": {}}', "a node of the structure has 0 keys, not one"),
        ('{"tree": {"pickle": "a"}}', "a node 'pickle' that is not valid"),
        ('{"tree": {"dict": []}}', "a node 'dict' that is not valid"),
        ('{"tree": {"items": [[1]]}}', "a bad pair of key and value"),
        ('{"tree": {"items": [[[], 1]]}}', "that is not valid"),
        ('{"tree": {"items": [[1, "a"], [true, "b"]]}}', "the structure has the key True twice in one dict"),
        ('{"tree": {"items": [[1, "a"], [1.0, "b"]]}}', r"the structure has the key 1\.0 twice in one dict"),
        ('{"tree": {"ordered": [["x", "a"], ["x", "b"]]}}', "the structure has the key 'x' twice in one dict"),
        ('{"tree": {"items": [[{"tuple": [1]}, 1], [{"tuple": [true]}, 2]]}}', r"has the key \(True,\) twice"),
        ('{"tree": {"items": [[{"int": "0x1' + "0" * 4000 + '"}, 1]]}}', "has a key of 16001 bits, more than 13000"),
        (
            '{"tree": {"items": ['
            + ",".join(f'[{{"int": "{5 + i * 8 * (2**61 - 1):#x}"}}, 1]' for i in range(101))
            + "]}}",
            "more than 100 keys of one dict of the structure have the same hash",
        ),
        ('{"tree": {"size": ["x"]}}', "torch.Size with items"),
        ('{"tree": {"dtype": "nn"}}', "a node 'dtype' that is not valid"),
        ('{"tree": {"dtype": 1}}', "a node 'dtype' that is not valid"),
        ('{"tree": {"device": "moon"}}', "a node 'device' that is not valid"),
        ('{"tree": {"float": "00"}}', "a node 'float' that is not valid"),
        ('{"tree": {"bytes": "?"}}', "a node 'bytes' that is not valid"),
        ('{"tree": {"text": "/w=="}}', "a node 'text' that is not valid"),
        ('{"tree": {"array": "a"}}', "should be an array, but NumPy has no torch.bfloat16"),
        ('{"tree": {"scalar": "b"}}', r"entry 'b' should be a scalar, but has the shape \(2,\)"),
        ('{"tree": ' + "[" * 102 + "]" * 102 + "}", "nested deeper than 100 containers"),
        ('{"tree": ' + "[" * 50000 + "]" * 50000 + "}", "nested too deeply"),
    ],
)
def test_a_wrong_structure_is_named(path, structure, text):
    with_structure(path, structure, a=torch.ones(2, dtype=torch.bfloat16), b=torch.ones(2))
    with pytest.raises(WireError, match=text) as caught:
        easydist.load(path)
    assert str(caught.value).startswith(f"{path}: ")


nodes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["a", "['a']", "", "7ff8", "cpu", "size"]),
    lambda child: (
        st.lists(child, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("tensor", "array", "scalar", "dict", "items", "ordered", "fields", "tuple", "size"),
                    *("float", "complex", "int", "bytes", "text", "dtype", "device", "x"),
                ]
            ),
            child,
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=launching.examples(300))
@given(
    nodes, st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"])), st.sampled_from([True, 1, None])
)
def test_any_json_is_a_structure_or_an_error(node, ties, named):
    text = json.dumps({"tree": node, "ties": ties, **({} if named is None else {"named": named})})
    try:
        data, _ = outline.decode(text, {"a": torch.ones(1)})
    except WireError:
        return
    assert_same(outline.decode(*outline.encode(data))[0], data)
    values, metadata = outline.describe(data)
    assert_same(outline.decode(metadata[outline.METADATA], values)[0], data)


@pytest.mark.slow
def test_the_name_of_a_dtype_imports_nothing(path):
    with_structure(path, '{"tree": {"dtype": "_inductor"}}')
    script = (
        "import sys, easydist\n"
        "try: easydist.load(sys.argv[1])\n"
        "except easydist.WireError: print('torch._inductor' in sys.modules)"
    )
    assert launching.forked("-c", script, path)[0] == "False\n"


def test_what_is_no_regular_file_is_refused_at_once(path):
    os.mkfifo(path)
    for operation, call in (
        ("load", lambda: easydist.load(path)),
        ("load", lambda: easydist.load_metadata(path)),
        ("load", lambda: easydist.read_header(path)),
        ("save", lambda: easydist.save({}, path)),
    ):
        with pytest.raises(OSError, match=f"{operation} needs a regular file, but this is a FIFO: '{path}'"):
            call()
    assert path.is_fifo()
    with pytest.raises(OSError, match="load needs a regular file, but this is a device: '/dev/zero'"):
        easydist.load("/dev/zero")
    with pytest.raises(IsADirectoryError):
        easydist.load(path.parent)


def peak_nbytes(path, into=None):
    """Return the peak of the memory that loading allocates."""
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError, ValueError):
            easydist.load(path, into=into)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


ALLOWANCE, PER_BYTE = 20_000_000, 150


@pytest.mark.parametrize("into", [None, {"a": 1}], ids=["alone", "into"])
def test_long_keys_of_many_children_take_no_memory_out_of_proportion(path, into):
    with_structure(path, '{"tree": {"dict": {"' + "k" * 40_000 + '": [' + "1," * 20_000 + "1]}}}")
    assert peak_nbytes(path, into) < ALLOWANCE + PER_BYTE * path.stat().st_size


@pytest.mark.slow
def test_into_of_long_paths_is_filled(path):
    data = {"k" * 40_000: list(range(2000))}
    easydist.save(data, path)
    assert easydist.load(path, into={"k" * 40_000: [0] * 2000}) == data


def drawn_node(draw, depth=0):
    """JSON of a random node, in which a part may come many times."""
    times = draw.choice([1, 2, 3000])
    kind = draw.randrange(4 if depth < 2 else 0, 9) if depth < 5 else 0
    if kind < 4:
        leaves = ["1", "null", '""', "1.5", '{"float":"7ff8000000000000"}', '{"int":"0x' + "1" * times + '"}']
        return draw.choice([*leaves, '{"tensor":"a"}', '{"bytes":"' + "AAAA" * times + '"}', '{"dtype":"int8"}', '"b"'])
    if kind < 6:
        child, kind = drawn_node(draw, depth + 1), draw.choice(["tuple", "size", ""])
        children = ",".join([child] * (times if len(child) * times < 100_000 else 1))
        return f'{{"{kind}":[{children}]}}' if kind else f"[{children}]"
    if kind == 6:
        keys = ["k" * draw.choice([0, 1, 20_000]) + str(i) for i in range(draw.randrange(3))]
        kind, pairs = draw.choice(["dict", "fields"]), [f'"{key}":{drawn_node(draw, depth + 1)}' for key in keys]
        return f'{{"{kind}":{{{",".join(pairs)}}}}}'
    kind = draw.choice(["items", "ordered"])
    pairs = [f"[{drawn_node(draw, 9)},{drawn_node(draw, depth + 1)}]" for _ in range(draw.randrange(3))]
    return f'{{"{kind}":[{",".join(pairs)}]}}'


@pytest.mark.slow
@pytest.mark.parametrize("seed", launching.sampled(range(100), 4))
def test_random_files_allocate_in_proportion_to_their_length(path, seed):
    draw = random.Random(seed)
    while not 3000 < len(text := drawn_node(draw)) < 200_000:
        pass
    ties = json.dumps({draw.choice("ab"): draw.choice("ab") for _ in range(draw.randrange(3))})
    named = draw.choice(["", ',"named":true'])
    with_structure(path, f'{{"tree":{text},"ties":{ties}{named}}}', a=torch.ones(2))
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([0, 0, 1, 2])):
        data[draw.randrange(len(data))] = draw.choice(b'0123456789-.eE{}[],:"\\ aU\xff\0')
    path.write_bytes(data)
    for into in (None, {"a": 1}):
        assert peak_nbytes(path, into) < ALLOWANCE + PER_BYTE * len(data), seed


@pytest.mark.parametrize("nbytes", [0, 7, 8, 30])
def test_a_truncated_file_is_a_wire_error(path, nbytes):
    easydist.save([torch.ones(3)], path)
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(WireError):
        easydist.load(path)
    with pytest.raises(WireError):
        easydist.load_metadata(path)
    with pytest.raises(WireError, match=f"^{path}: "):
        easydist.read_header(path)


def test_a_tree_nested_101_deep_is_refused(path):
    data = leaf = []
    for _ in range(99):
        leaf.append([])
        leaf = leaf[0]
    easydist.save(data, path)
    assert easydist.load(path) == data
    leaf.append([])
    with pytest.raises(ValueError, match="is nested deeper than 100 containers"):
        easydist.save(data, path)


def test_a_missing_file_is_an_os_error(path):
    with pytest.raises(FileNotFoundError):
        easydist.load(path)
    with pytest.raises(FileNotFoundError):
        easydist.save([], path / "nowhere")


@pytest.mark.parametrize("name", ["new/", "file/", "new//"])
def test_the_path_of_a_folder_is_refused_though_there_is_none(tmp_path, name):
    easydist.save([1], tmp_path / "file")
    with pytest.raises(IsADirectoryError, match=f"save needs the path of a file, .*: '{tmp_path}/{name}'$"):
        easydist.save([2], f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == ["file"]
    assert easydist.load(tmp_path / "file") == [1]


def test_an_error_names_the_file_and_not_its_temporary_name(path):
    os.close(free := os.dup(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match=f"Too many open files: '{path}'$"):
            easydist.save([1], path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not os.listdir(path.parent)


def test_things_are_named_where_they_stand(path):
    with pytest.raises(TypeError, match=r"^\['a'\]\[0\]\.name is a Thing; a file holds"):
        easydist.save({"a": [Batch(torch.ones(1), THING)]}, path)
    with pytest.raises(TypeError, match=r"^\['a'\] is an array of <U1; a file holds"):
        easydist.save({"a": np.array(["x"])}, path)
    with pytest.raises(TypeError, match=r"^leaf \['a'\] is a masked array, whose mask would be lost; send \.data"):
        easydist.save({"a": np.ma.masked_array([1], [True])}, path)
    with pytest.raises(TypeError, match=r"leaf \['a'\] is not a dense tensor"):
        easydist.save({"a": torch.eye(2).to_sparse()}, path)


def test_a_module_to_load_into_is_an_error_that_names_its_state_dict(path):
    easydist.save((layer := torch.nn.Linear(2, 1)).state_dict(), path)
    with pytest.raises(
        TypeError, match=r"^load: into= takes a tree of tensors, got a Linear; pass its state_dict\(\)$"
    ):
        easydist.load(path, into=layer)


def test_swapped_arguments_are_an_error_that_says_so(tmp_path):
    for path in (tmp_path / "x.safetensors", str(tmp_path / "x.safetensors")):
        with pytest.raises(
            TypeError, match=r"^save: got dict as the path, .*they are swapped; pass save\(tree, path\)$"
        ):
            easydist.save(path, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match=r"^save: got int as the path; pass save\(tree, path\)$"):
        easydist.save({"a": 1}, 5)
    assert not list(tmp_path.iterdir())
