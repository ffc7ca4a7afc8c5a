"""The structure of a tree as JSON, without the names of classes.

A node is JSON's own null, true, number, text, or array (a list), or an object with one key:

==============================  ===============================================================================
``{"tensor": path}``            a leaf, also ``array`` and ``scalar`` (NumPy's)
``{"dict": {…}}``               ``{"items": [[key, node], …]}`` if not all keys are text; ``ordered`` has that form, too
``{"fields": {…}}``             a namedtuple or dataclass; read as a dict
``{"tuple": […]}``              also ``size`` (``torch.Size``)
``{"float": "7ff8…"}``          a number that JSON lacks, as the hexadecimal digits of its bytes; also ``complex``
``{"int": "0x…"}``              an integer beyond 64 bits
``{"bytes": "…"}``              bytes in base64; also ``text`` that JSON would change, as the bytes of its UTF-8
``{"dtype": "float32"}``        also ``{"device": "cpu"}``
``{"object": 0}``               an object beside the text, by its index there (messages only)
``{"parameter": path}``         with ``objects``; ``frozen`` is one without gradient, ``grad`` a tensor with one
==============================  ===============================================================================

The root is ``{"tree": node, "ties": {path: path}}``: the tensor at the first path is the one at the second path. If it
also has ``"named": true``, tensors have names (``naming``), which then stand in place of their paths.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import math
import re
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from easydist import tree
from easydist.base.wording import a_or_an
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.data.packing import dtype_name
from easydist.errors import WireError
from easydist.format.header import parse_json
from easydist.format.naming import Names, flat_names, given_names
from easydist.typing import Device, Tree

METADATA = "easydist.tree"
"""The key of the structure in a header's ``__metadata__``."""

MAX_DEPTH = 100
"""The deepest nesting of containers."""

_MAX_KEY_BITS = 13_000
"""The most bits of an integer key: paths contain its digits, and Python writes at most 4300 of them."""

_MAX_SAME_HASH = 100
"""The most keys of one dict with the same hash, because all of them are compared; (±1, ±2, …) have some such keys."""

_ROOM, _ROOM_PER_CHARACTER = 1 << 24, 16


def encode(
    data: Tree,
    holder: str = "a file",
    advice: str = "save its parts, or use torch.save",
    objects: list[Any] | None = None,
) -> tuple[str, dict[str, torch.Tensor]]:
    r"""Return the structure of a tree as text, and its tensors by path, those in the same memory once.

    Example:
        >>> encode({"a": torch.ones(1), "b": (2, None)})
        ('{"tree":{"dict":{"a":{"tensor":"[\'a\']"},"b":{"tuple":[2,null]}}}}', {"['a']": tensor([1.])})

    Args:
        data: The tree.
        holder: The object that cannot hold the tree, for the error.
        advice: The advice, for the error.
        objects: A list to which the values are appended that JSON and tensors cannot express; parameters and
            ``requires_grad`` are then kept, too. None to refuse such values.

    Raises:
        TypeError: The tree holds a value that JSON and tensors cannot express; the text names its path.
        ValueError: The tree is nested deeper than ``MAX_DEPTH``, or contains itself, or has keys that ``decode``
            refuses.
    """
    writer = _Writer(iter(tree.flatten(data, _ends_of(objects))[1].paths), objects)
    return _structure(writer, data, holder, advice), writer.tensors


def describe(
    data: Tree,
    metadata: Mapping[str, str] | None = None,
    names: Names = None,
    holder: str = "a file",
    advice: str = "save its parts, or use torch.save",
    objects: list[Any] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a tree by name, and the metadata of its header, which contains the structure.

    Tensors are named by their keys if the tree is a flat mapping of text to tensors, by ``names`` if given, otherwise
    by their paths. In the first two cases the metadata is also that of other programs: ``format``, and the name under
    which a tied tensor is stored for each of its other names.

    Example:
        >>> x = torch.ones(1)
        >>> tensors, metadata = describe({"b": x, "a": x})
        >>> tensors, metadata["b"], metadata["format"]
        ({'a': tensor([1.])}, 'a', 'pt')

    Args:
        data: The tree.
        metadata: Further texts, which take precedence.
        names: The names of the tensors; see ``naming``.
        holder: As in ``encode``.
        advice: As in ``encode``.
        objects: As in ``encode``.

    Raises:
        TypeError: As for ``encode``, or ``names`` returns something other than text.
        ValueError: As for ``encode``, or two tensors get the same name.
    """
    leaves, spec = tree.flatten(data, _ends_of(objects))
    named = flat_names(data, spec.paths) if names is None else given_names(data, leaves, spec.paths, names)
    writer = _Writer(iter(spec.paths), objects, named)
    text = _structure(writer, data, holder, advice)
    if named is None:
        return writer.tensors, {**(metadata or {}), METADATA: text}
    ties = {name: kept for name, kept in writer.ties.items() if name != "format" and not name.startswith("easydist.")}
    return writer.tensors, {"format": "pt", **ties, **(metadata or {}), METADATA: text}


def _structure(writer: _Writer, data: Tree, holder: str, advice: str) -> str:
    """Return the structure as text; the writer then has the tensors."""
    try:
        node = writer.node(data, "", 0)
    except _Refused as refused:
        raise TypeError(
            f"{refused}; {holder} holds tensors, arrays, numbers, text, bytes, None and plain containers of them: "
            f"{advice}"
        ) from None
    ties = {"ties": writer.keep_first_names()} if writer.ties else {}
    return json.dumps({"tree": node, **ties, **({"named": True} if writer.is_named else {})}, separators=(",", ":"))


class _Refused(TypeError):
    """The error that names the part of the tree that JSON cannot hold."""


_OPENED = frozenset({dict, OrderedDict, list, tuple, torch.Size})
_JSON = frozenset({str, bytes, torch.dtype, torch.device, type(None)})


def is_object(value: Any) -> bool:
    """True if JSON and tensors cannot express a value, or would return another type."""
    if tree.is_leaf(value):
        return isinstance(value, np.ndarray) and not is_numeric(value)
    return type(value) not in _OPENED and type(value) not in _JSON


def _ends_of(objects: list[Any] | None) -> Callable[[Any], bool]:
    return tree.is_leaf if objects is None else _ends


def _ends(value: Any) -> bool:
    return tree.is_leaf(value) or is_object(value)


class _Writer:
    def __init__(
        self, paths: Iterator[str], objects: list[Any] | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        self.paths = paths
        self.is_named = names is not None
        self._objects, self._names = objects, names
        self.tensors: dict[str, torch.Tensor] = {}
        self.ties: dict[str, str] = {}
        self._first: dict[Any, str] = {}
        # A mapping may create its values on each access; later ones must not get their addresses.
        self._alive: list[Any] = []

    def node(self, value: Any, path: str, depth: int) -> Any:
        if self._objects is not None and is_object(value):
            next(self.paths)
            self._objects.append(value)
            return {"object": len(self._objects) - 1}
        if tree.is_leaf(value):
            return self._leaf(value, next(self.paths))
        if not tree.is_container(value):
            return _constant(value, path)
        if depth == MAX_DEPTH:
            raise ValueError(f"{path[:100]}… is nested deeper than {MAX_DEPTH} containers")
        children, spec = tree.flatten(value, lambda part: part is not value)
        pairs = zip(children, spec.paths, strict=True)
        return _container(value, [self.node(child, path + step, depth + 1) for child, step in pairs], spec.paths, path)

    def _leaf(self, value: Any, path: str) -> Any:
        if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return _constant(value, path)
        if isinstance(value, np.ndarray) and not is_numeric(value):
            check_unmasked(value, path)
            raise _refused(path, f"an array of {value.dtype}")
        tensor = as_tensor(value, path)
        name = path if self._names is None else self._names[path]
        self._alive.append(value)
        first = self._first.setdefault(memory_of(value), name)
        if first == name:
            self.tensors[name] = tensor
        else:
            self.ties[name] = first
        return {self._kind(value): name}

    def keep_first_names(self) -> dict[str, str]:
        """Store each tied tensor under its alphabetically first name, as ``safetensors`` does; return the ties."""
        if self.is_named:
            tied: dict[str, list[str]] = {}
            for name, first in self.ties.items():
                tied.setdefault(first, [first]).append(name)
            self.ties = {}
            for first, names in tied.items():
                kept = min(names)
                self.tensors[kept] = self.tensors.pop(first)
                self.ties |= {name: kept for name in names if name != kept}
        return self.ties

    def _kind(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return "array" if isinstance(value, np.ndarray) else "scalar"
        if self._objects is not None and isinstance(value, torch.nn.Parameter):
            return "parameter" if value.requires_grad else "frozen"
        return "grad" if self._objects is not None and value.requires_grad else "tensor"


def memory_of(value: Any) -> Any:
    """Return a key that is equal for tensors with the same elements in the same memory, while these are alive."""
    if isinstance(value, torch.Tensor) and value.numel() and (address := value.data_ptr()):
        layout = value.dtype, value.device, tuple(value.shape), value.stride()
        return address, *layout, value.is_conj(), value.is_neg()
    return id(value) if isinstance(value, torch.Tensor | np.ndarray) else object()


def _refused(path: str, what: str) -> _Refused:
    return _Refused(f"{path or 'the tree'} is {what}")


def _container(data: Any, nodes: list[Any], steps: list[str], path: str) -> Any:
    if isinstance(data, Mapping):
        keys = list(data.keys())  # a TensorDict iterates over its rows
        if type(data) is not OrderedDict and all(type(key) is str and not _is_changed(key) for key in keys):
            return {"dict": dict(zip(keys, nodes, strict=True))}
        pairs = [[_key(key, path), node] for key, node in zip(keys, nodes, strict=True)]
        _check_readable(pairs, path)
        return {"ordered" if type(data) is OrderedDict else "items": pairs}
    if isinstance(data, list | deque):
        return nodes
    if tree.is_namedtuple(data) or (dataclasses.is_dataclass(data) and not tree.is_registered(data)):
        return {"fields": {step[1:]: node for step, node in zip(steps, nodes, strict=True)}}
    if isinstance(data, tuple):
        return {"size" if type(data) is torch.Size else "tuple": nodes}
    raise _refused(path, a_or_an(type(data).__name__))


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def _is_changed(text: str) -> bool:
    """True if JSON would change a text: it reads both halves of a surrogate pair as the character they stand for."""
    return not text.isascii() and _PAIR.search(text) is not None


def _key(key: Any, path: str) -> Any:
    return {"tuple": [_key(part, path) for part in key]} if type(key) is tuple else _constant(key, f"{path}[{key!r}]")


def _check_readable(pairs: Sequence[Any], path: str) -> None:
    try:
        _read_keys(pairs)
    except WireError as error:
        raise ValueError(f"{path or 'the tree'} could not be read again: {error}") from None


def _constant(value: Any, path: str) -> Any:
    if isinstance(value, bool | str | None) and not isinstance(value, enum.Enum):
        if isinstance(value, str) and _is_changed(value):
            return {"text": _base64(value.encode("utf-8", "surrogatepass"))}
        return value
    if isinstance(value, int) and not isinstance(value, enum.Enum):
        return int(value) if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if isinstance(value, float) and not isinstance(value, enum.Enum):
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, complex):
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, bytes):
        return {"bytes": _base64(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {"dtype": dtype_name(value)} if isinstance(value, torch.dtype) else {"device": str(value)}
    raise _refused(path, a_or_an(type(value).__name__))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(
    text: str,
    tensors: Mapping[str, torch.Tensor],
    device: Device | None = "cpu",
    into: Iterable[str] | None = None,
    objects: Sequence[Any] = (),
) -> tuple[Tree, dict[str, Any]]:
    """Return the tree that ``encode`` has encoded, and its leaves by path.

    Args:
        text: The text from ``encode``.
        tensors: The tensors from ``encode``; those of arrays are on the CPU.
        device: The device of the tensors; None leaves them on theirs. Arrays stay on the CPU.
        into: The paths of the wanted leaves; None to return no leaves. A short text can describe paths with a total
            length of gigabytes, so paths are made only up to about the length of these.
        objects: The objects from ``encode``.

    Raises:
        WireError: ``text`` does not have that form, or does not fit the tensors, or its paths are far longer than
            ``into``.

    Cost: time and memory linear in the text, and in the paths ``into``.
    """
    root = (_known if len(text) <= _CACHED else _parsed)(text)
    if not isinstance(root, dict) or not {"tree"} <= root.keys() <= {"tree", "ties", "named"}:
        raise WireError("the structure needs 'tree' and may have 'ties' and 'named'")
    if root.get("named", True) is not True:
        raise WireError("'named' of the structure is not true")
    ties = root.get("ties", {})
    if not isinstance(ties, dict) or not all(isinstance(name, str) for name in ties.values()):
        raise WireError("the ties of the structure are not an object of strings")
    room = None if into is None else _ROOM + _ROOM_PER_CHARACTER * len(text) + sum(map(len, into))
    reader = _Reader(tensors, ties, device, room, objects, root.get("named") is True)
    data = reader.node(root["tree"])
    if unused := tensors.keys() - reader.used:
        raise WireError(f"entry {min(unused)!r} has no place in the structure")
    return data, reader.leaves


def is_named(text: str) -> bool:
    """True if the tensors of a structure have names other than their paths.

    Raises:
        WireError: ``text`` is not JSON.
    """
    root = (_known if len(text) <= _CACHED else _parsed)(text)
    return isinstance(root, dict) and root.get("named") is True


_CACHED = 1 << 14


def _parsed(text: str) -> Any:
    return parse_json(text.encode(errors="surrogatepass"))


_known = functools.lru_cache(maxsize=64)(_parsed)
"""The cached parser: an engine gets the same structure at every step. The result must not be changed."""


def _with_gradient(kind: str, tensor: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return _TENSOR_KINDS[kind](tensor)
    except RuntimeError:
        raise WireError(f"entry {name!r} should have a gradient, but {tensor.dtype} has none") from None


_TENSOR_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda tensor: tensor,
    "grad": lambda tensor: tensor.detach().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "frozen": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
}
"""The conversions of a tensor; all results share its memory, which may be filled later."""

_LEAF_KINDS = _TENSOR_KINDS.keys() | {"array", "scalar"}


class _Reader:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        ties: Mapping[str, str],
        device: Device | None,
        room: int | None,
        objects: Sequence[Any],
        is_named: bool,
    ) -> None:
        self._tensors, self._ties, self._device, self._room = tensors, ties, device, room
        self._objects, self._is_named = objects, is_named
        self._done: dict[tuple[str, str], Any] = {}
        self._steps: list[str] = []
        self.used: set[str] = set()
        self.leaves: dict[str, Any] = {}

    def node(self, node: Any) -> Any:
        if len(self._steps) > MAX_DEPTH:
            raise WireError(f"the structure is nested deeper than {MAX_DEPTH} containers")
        if isinstance(node, list):
            return self._children(node)
        kind, content = _tagged(node)
        if kind in _LEAF_KINDS and isinstance(content, str):
            return self._kept(self._leaf(kind, content), None if self._is_named else content)
        if kind in ("dict", "fields") and isinstance(content, dict):
            step = "[{!r}]" if kind == "dict" else ".{}"
            return {key: self._child(part, step, key) for key, part in content.items()}
        if kind in ("items", "ordered") and isinstance(content, list):
            return self._pairs({} if kind == "items" else OrderedDict(), content)
        if kind in ("tuple", "size") and isinstance(content, list):
            return _tuple(kind, self._children(content))
        if kind == "object" and type(content) is int and 0 <= content < len(self._objects):
            return self._objects[content]
        value = _read_constant(node)
        return self._kept(value) if self._room is not None and tree.is_leaf(value) else value

    def _kept(self, value: Any, path: str | None = None) -> Any:
        """Return the value of a leaf, and add it to the leaves if these are wanted."""
        if self._room is not None:
            self._room -= sum(map(len, self._steps))
            if self._room < 0:
                raise WireError("the paths of the structure's leaves are far longer than those of into=")
            self.leaves["".join(self._steps) if path is None else path] = value
        return value

    def _child(self, node: Any, step: str, key: Any) -> Any:
        self._steps.append("" if self._room is None else step.format(key))
        value = self.node(node)
        self._steps.pop()
        return value

    def _children(self, nodes: list[Any]) -> list[Any]:
        return [self._child(node, "[{}]", i) for i, node in enumerate(nodes)]

    def _pairs(self, data: dict[Any, Any], pairs: list[Any]) -> dict[Any, Any]:
        for key, pair in zip(_read_keys(pairs), pairs, strict=True):
            data[key] = self._child(pair[1], "[{!r}]", key)
        return data

    def _leaf(self, kind: str, path: str) -> Any:
        name = self._ties.get(path, path)
        if name not in self._tensors:
            raise WireError(f"the structure has a leaf {path!r}, but there is no entry {name!r}")
        self.used.add(name)
        if (kind, name) not in self._done:
            self._done[kind, name] = self._converted(kind, self._tensors[name], name)
        return self._done[kind, name]

    def _converted(self, kind: str, tensor: torch.Tensor, name: str) -> Any:
        if kind in _TENSOR_KINDS:
            return _with_gradient(kind, tensor if self._device is None else tensor.to(self._device), name)
        try:
            array = tensor.numpy()
        except TypeError:
            raise WireError(f"entry {name!r} should be an array, but NumPy has no {tensor.dtype}") from None
        if kind == "scalar" and array.ndim:
            raise WireError(f"entry {name!r} should be a scalar, but has the shape {array.shape}")
        return array[()] if kind == "scalar" else array


def _tagged(node: Any) -> tuple[str, Any]:
    if not isinstance(node, dict):
        return "", node
    if len(node) != 1:
        raise WireError(f"a node of the structure has {len(node)} keys, not one")
    return next(iter(node.items()))


def _tuple(kind: str, children: list[Any]) -> tuple[Any, ...]:
    if kind == "tuple":
        return tuple(children)
    if not all(type(child) is int and 0 <= child < 2**63 for child in children):
        raise WireError("the structure has a torch.Size with items that are not sizes")
    return torch.Size(children)


def _read_keys(pairs: Sequence[Any]) -> list[Any]:
    """Return the keys of a dict from its pairs of key and value."""
    keys: dict[Any, None] = {}
    hashes: dict[int, int] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise WireError("the structure has a bad pair of key and value")
        key = _read_key(pair[0])
        count = hashes[hash(key)] = hashes.get(hash(key), 0) + 1
        if count > _MAX_SAME_HASH:
            raise WireError(f"more than {_MAX_SAME_HASH} keys of one dict of the structure have the same hash")
        if key in keys:  # 1, true and 1.0 are the same key
            raise WireError(f"the structure has the key {key!r:.100} twice in one dict")
        keys[key] = None
    return list(keys)


def _read_key(node: Any, depth: int = 0) -> Any:
    kind, content = _tagged(node)
    if kind == "tuple" and isinstance(content, list):
        if depth == MAX_DEPTH:
            raise WireError(f"the structure has a key nested deeper than {MAX_DEPTH} tuples")
        return tuple(_read_key(part, depth + 1) for part in content)
    key = _read_constant(node)
    if isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        raise WireError(f"the structure has a key of {key.bit_length()} bits, more than {_MAX_KEY_BITS}")
    return key


_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""The dtypes by name; getattr on torch could import a module, for some names."""

_CONSTANTS: dict[str, Callable[[str], Any]] = {
    "int": lambda digits: int(digits, 16),
    "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
    "complex": lambda digits: complex(*struct.unpack(">dd", bytes.fromhex(digits))),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "text": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
}


def _read_constant(node: Any) -> Any:
    kind, content = _tagged(node)
    if node is None or isinstance(node, bool | int | float | str):
        return node
    try:
        if isinstance(content, str):
            return _CONSTANTS[kind](content)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error):
        pass
    raise WireError(f"the structure has a node {kind[:100]!r} that is not valid")
