"""Trees that are hard to move, hypothesis strategies for more of them, and an exact comparison.

``CASES`` maps a name to a function that makes a new tree, so that workers can make the same tree by its name.
"""

import dataclasses
import enum
import struct
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils import _pytree

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
ARRAY_DTYPES = ["?", "u1", "i1", "i2", "<i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8"]


# --- comparison


def difference(got: Any, want: Any, *, identity: bool = False, path: str = "") -> str:
    """Describe the difference of two trees, or return "". Types, key order, dtypes, shapes and all bits count.

    Strides do not count.

    Args:
        got: A tree.
        want: The expected tree.
        identity: Values that are neither containers nor numbers must be the same objects, not just equal.
        path: The path of the two.
    """
    at = path or "the root"
    if type(got) is not type(want):
        return f"{at}: {type(got).__name__}, should be {type(want).__name__}"
    if isinstance(want, torch.Tensor | np.ndarray | np.generic):
        if (got.dtype, tuple(got.shape)) != (want.dtype, tuple(want.shape)):
            return f"{at}: {got.dtype} {tuple(got.shape)}, should be {want.dtype} {tuple(want.shape)}"
        return "" if bits(got) == bits(want) else f"{at}: {got!r}, should be {want!r}"
    if isinstance(want, float | complex):
        return "" if _number_bits(got) == _number_bits(want) else f"{at}: {got!r}, should be {want!r}"
    if (parts := _open(want)) is not None:
        return _compare_parts(_open(got), parts, identity, path)
    alike = got is want if identity and not isinstance(want, int) else got == want
    return "" if alike else f"{at}: {got!r}, should be {'the very ' if identity else ''}{want!r}"


def same(got: Any, want: Any, *, identity: bool = False) -> bool:
    """True if two trees are alike to the last bit; see ``difference``."""
    return not difference(got, want, identity=identity)


def assert_same(got: Any, want: Any, *, identity: bool = False) -> None:
    """Fail with the first difference."""
    found = difference(got, want, identity=identity)
    assert not found, found


def bits(value: Any) -> bytes:
    """Return the elements in row-major order as bytes."""
    if isinstance(value, torch.Tensor):
        dense = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        return dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()


def _number_bits(value: complex) -> bytes:
    number = complex(value)
    return struct.pack("dd", number.real, number.imag)


def _open(data: Any) -> tuple[list[tuple[str, Any]], Any] | None:
    """Return (path step, child) pairs and the container's other state, without using easydist's own trees."""
    if isinstance(data, Mapping):
        extra = {k: v for k, v in vars(data).items() if k != "data"} if isinstance(data, UserDict) else None
        about = [getattr(data, name, None) for name in ("default_factory", "batch_size")]
        return [(f"[{key!r}]", data[key]) for key in data.keys()], (list(data.keys()), extra, about)  # noqa: SIM118
    if isinstance(data, list | tuple | deque):
        return [(f"[{i}]", child) for i, child in enumerate(data)], getattr(data, "maxlen", None)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
        return [(f".{name}", getattr(data, name)) for name in names], None
    if (node := _pytree.SUPPORTED_NODES.get(type(data))) is not None:
        children, context = node.flatten_fn(data)
        return [(f"[{i}]", child) for i, child in enumerate(children)], context
    return None


def _compare_parts(got: Any, want: Any, identity: bool, path: str) -> str:
    (got_items, got_about), (want_items, want_about) = got, want
    if [step for step, _ in got_items] != [step for step, _ in want_items] or got_about != want_about:
        return f"{path or 'the root'}: holds {[s for s, _ in got_items]}, should hold {[s for s, _ in want_items]}" + (
            f"; {got_about!r}, should be {want_about!r}" if got_about != want_about else ""
        )
    pairs = zip(got_items, want_items, strict=True)
    return next(filter(None, (difference(g, w, identity=identity, path=path + s) for (_, g), (s, w) in pairs)), "")


# --- classes


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")


class Doubled(namedtuple("Doubled", "x y")):
    """A namedtuple whose constructor takes other arguments than its fields."""

    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)


class Pair(tuple):
    __slots__ = ()


class Items(list):
    pass


class Registry(dict):
    pass


class FrozenMapping(Mapping):
    """A mapping that cannot be written."""

    def __init__(self, data):
        self._data = dict(data)

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


@dataclasses.dataclass
class Batch:
    ids: Any
    name: str = "train"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "a"


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


@dataclasses.dataclass
class Counted:
    """A dataclass with a field that __init__ does not take. It counts the calls of __post_init__."""

    x: Any
    total: Any = dataclasses.field(init=False)
    runs: list = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self):
        self.total = self.x.sum()
        self.runs.append("post_init")


class Box:
    """A class registered with torch.utils._pytree; ``label`` is not a child."""

    def __init__(self, content, label="box"):
        self.content = content
        self.label = label

    def __getitem__(self, index):
        return [self.content][index]


_pytree.register_pytree_node(
    Box, lambda box: ([box.content], box.label), lambda c, label: Box(c[0], label), serialized_type_name="trees.Box"
)


class Thing:
    """A class that is not data."""


THING = Thing()
ODD_KEYS = [None, (1, "a"), 1, "1", "", "it's", 'a"b', b"b", 2.5, False, "line\nbreak", ...]


def batch_encoding():
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": torch.arange(4).view(2, 2), "words": ["a", "b"]})


def model_output():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=torch.ones(2, 3), hidden_states=(torch.zeros(1), torch.ones(1)))


def tensordict():
    from tensordict import TensorDict

    return TensorDict({"a": torch.arange(4), "n": TensorDict({"b": torch.ones(4, 2)}, [4])}, batch_size=[4])


def tied():
    weight = torch.arange(3.0)
    return {"encoder": weight, "decoder": [weight], "other": torch.arange(3.0)}


def read_only():
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


def _default():
    data = defaultdict(list, {"b": torch.ones(1)})
    data["a"].append(1)
    return data


# --- cases

TENSORS = {
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "empty inside": lambda: torch.empty(2, 0, 3, dtype=torch.int16),
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "strided": lambda: torch.arange(10)[1::3],
    "expanded": lambda: torch.arange(3).expand(2, 3),
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conj view": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "neg view": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "nan and -0": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    **{str(dtype)[6:]: lambda dtype=dtype: torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in DTYPES},
}
ARRAYS = {
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "0-dim array": lambda: np.array(3),
    "empty array": lambda: np.empty((0, 2), np.int8),
    "read-only array": read_only,
    "broadcast array": lambda: np.broadcast_to(np.arange(2), (3, 2)),
    "negative strides": lambda: np.arange(6).reshape(2, 3)[::-1, ::-1],
    "field of a record": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f4")])["b"],
    "fortran order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    **{f"array {dtype}": lambda dtype=dtype: np.array([0, 1, 1]).astype(dtype) for dtype in ARRAY_DTYPES},
}
SCALARS = {
    **{f"scalar {dtype}": lambda dtype=dtype: np.dtype(dtype).type(1) for dtype in ["?", "i2", "u8", "f2", "f4", "c8"]},
    **{
        repr(value): lambda value=value: value
        for value in (True, 0, -(2**63), 2**63 - 1, 0.5, -0.0, float("nan"), 1 - 2j)
    },
}
STATICS = {
    "None": lambda: None,
    "str": lambda: "text",
    "bytes": lambda: b"text",
    "enum": lambda: Color.RED,
    "int enum": lambda: Level.LOW,
    "object": lambda: THING,
    "class": lambda: Batch,
    "function": lambda: difference,
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "set": lambda: {1, 2},
}
CONTAINERS = {
    **{
        f"empty {kind.__name__}": kind
        for kind in (dict, list, tuple, OrderedDict, defaultdict, UserDict, torch.Size, deque)
    },
    "nest of empties": lambda: {"a": [], "b": {"c": ()}, "d": [[[]]]},
    "dict in inserting order": lambda: {"b": 1, "a": torch.ones(1), "c": "s"},
    "odd keys": lambda: {key: torch.tensor(i) for i, key in enumerate(ODD_KEYS)},
    "statics": lambda: [make() for make in STATICS.values()],
    "namedtuple": lambda: Point(torch.ones(2), {"z": (1, "s")}),
    "namedtuple with its own __new__": lambda: Doubled(torch.ones(2)),
    "return type": lambda: torch.arange(6.0).view(2, 3).max(dim=1),
    "size": lambda: torch.Size([2, 3]),
    "tuple subclass": lambda: Pair((torch.ones(1), "a")),
    "list subclass": lambda: Items([torch.ones(1), "a"]),
    "dict subclass": lambda: Registry(a=torch.ones(1)),
    "ordered dict": lambda: OrderedDict(b=torch.ones(1), a=2),
    "default dict": _default,
    "counter": lambda: Counter("abca"),
    "user dict": lambda: UserDict(a=torch.ones(1), b=UserDict(c=1)),
    "mapping proxy": lambda: types.MappingProxyType({"a": torch.ones(1)}),
    "frozen mapping": lambda: FrozenMapping({"a": torch.ones(1), "b": "s"}),
    "deque": lambda: deque([torch.ones(1), 2], maxlen=3),
    "dataclass": lambda: Batch([torch.ones(1), 2]),
    "frozen dataclass": lambda: Frozen(torch.ones(1)),
    "dataclass with slots": lambda: Slotted(torch.ones(1), {"z": 1}),
    "frozen dataclass with slots": lambda: FrozenSlotted(torch.ones(1)),
    "dataclass with init=False": lambda: Counted(torch.ones(3)),
    "registered": lambda: Box({"a": torch.ones(1)}, label="lid"),
    "tied": tied,
    "deep": lambda: {"a": [({"b": [Point([torch.ones(1)], Batch({"c": (1.5,)}))]},)]},
}
OUTSIDERS = {"BatchEncoding": batch_encoding, "ModelOutput": model_output, "TensorDict": tensordict}
LEAVES = {**TENSORS, **ARRAYS, **SCALARS}
CASES = {**LEAVES, **STATICS, **CONTAINERS, **OUTSIDERS}


# --- strategies


@st.composite
def tensors(draw, dtypes=tuple(DTYPES), max_dims=3, max_side=4):
    """Draw tensors of random bits: contiguous, transposed, strided or expanded."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, max_side), max_size=max_dims))
    raw = bytearray(draw(st.binary(min_size=(n := torch.Size(shape).numel() * dtype.itemsize), max_size=n)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    match draw(st.sampled_from(["as it is", "transposed", "strided", "expanded"])):
        case "transposed":
            return tensor.permute(list(reversed(range(tensor.ndim))))
        case "strided" if tensor.ndim:
            return tensor[::2]
        case "expanded":
            return tensor.expand(2, *tensor.shape)
    return tensor


@st.composite
def arrays(draw):
    """Draw NumPy arrays of small numbers, of any byte order and direction."""
    array = np.array(draw(st.lists(st.integers(0, 100), max_size=4))).astype(draw(st.sampled_from(ARRAY_DTYPES)))
    return array[::-1] if draw(st.booleans()) else array


def numbers():
    """Return a strategy for Python numbers that fit a tensor."""
    return st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.complex_numbers()


def statics():
    """Return a strategy for values that belong to the structure."""
    return st.none() | st.text(max_size=3) | st.sampled_from([THING, Color.RED, Level.LOW, torch.float32, b"b"])


def nested(leaves):
    """Return a strategy for trees of all kinds of containers over ``leaves``."""
    keys = st.text(max_size=2) | st.sampled_from(ODD_KEYS)

    def containers(child):
        dicts = st.dictionaries(keys, child, max_size=3)
        lists = st.lists(child, max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            lists.map(Items),
            lists.map(Pair),
            dicts,
            dicts.map(OrderedDict),
            dicts.map(lambda d: defaultdict(list, d)),
            dicts.map(UserDict),
            dicts.map(FrozenMapping),
            st.builds(Point, child, child),
            st.builds(Batch, child, st.text(max_size=2)),
            st.builds(FrozenSlotted, child),
            st.builds(Box, child),
        )

    return st.recursive(leaves, containers, max_leaves=8)


def trees():
    """Return a strategy for any tree."""
    return nested(tensors(max_dims=2, max_side=2) | arrays() | numbers() | statics())
