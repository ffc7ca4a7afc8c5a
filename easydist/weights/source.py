"""A state dict prepared for sending: its entries, their names and dtypes, and the blocks that this rank holds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from easydist.base.recent import Recent
from easydist.data import packing
from easydist.data.backing import addresses
from easydist.data.leaves import as_tensor
from easydist.format import header, outline
from easydist.verbs.sharded import is_sharded
from easydist.weights.blocks import Block, whole
from easydist.weights.schedule import BlockPart, Packet
from easydist.weights.shards import LocalShard, box_of, is_shard, is_tensor, local, memory_of

PINS = frozenset(["cuda", "xpu"])
"""The types of devices to and from which copies are faster in pinned memory. torch's for MPS is not on the CPU."""

LONGEST = 1 << 22
"""The longest header, in bytes, whose decoded form and further results are kept."""

_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])
_layout_of = attrgetter("dtype", "shape", "device", "requires_grad")
_FLAGS = torch.Tensor.is_neg, torch.Tensor.is_inference

METADATA = "easydist.weights"
"""The key in a header's ``__metadata__`` for the further facts about the state dict."""

Rename = Callable[[str], str] | Mapping[str, str] | None
Filter = Callable[[str], bool] | None


def casts(given: torch.dtype, other: torch.dtype) -> bool:
    """True if values of one dtype can become values of the other on the way: torch has no cast from or to float4.

    Example:
        >>> casts(torch.float32, torch.float8_e4m3fn), casts(torch.float32, torch.float4_e2m1fn_x2)
        (True, False)
    """
    are_floats = given.is_floating_point and other.is_floating_point
    return given == other or (are_floats and torch.float4_e2m1fn_x2 not in (given, other))


def state_of(model_or_dict: Any) -> Mapping[str, Any]:
    """Return the entries of a module or of a dict.

    Raises:
        TypeError: It is neither, or a name is not a string.
    """
    state = model_or_dict.state_dict() if isinstance(model_or_dict, nn.Module) else model_or_dict
    if not isinstance(state, Mapping):
        raise TypeError(f"pass a module or a dict of tensors, got {type(model_or_dict).__name__}")
    for name in state:
        if not isinstance(name, str):
            raise TypeError(f"the names of a state dict are text, got {name!r}")
    return state


def named(names: Iterable[str], keep: Filter, rename: Rename) -> dict[str, str]:
    """Return the new name of each name that ``keep`` selects.

    Raises:
        ValueError: Two names become the same.

    Example:
        >>> named(["a.x", "b.x"], lambda name: name != "b.x", lambda name: "model." + name)
        {'a.x': 'model.a.x'}
    """
    change = (lambda name: rename.get(name, name)) if isinstance(rename, Mapping) else rename
    found = {name: change(name) if change else name for name in names if keep is None or keep(name)}
    if len(set(found.values())) < len(found):
        first: dict[str, str] = {}
        one, other = next((first[new], old) for old, new in found.items() if first.setdefault(new, old) != old)
        raise ValueError(f"rename= makes {one!r} and {other!r} both {found[other]!r}")
    return found


class _HeldPart(NamedTuple):
    """This rank's part of an entry, and the block that it covers."""

    values: torch.Tensor
    box: Block
    is_cut: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


def _held(name: str, value: torch.Tensor | LocalShard, dtype: torch.dtype | None) -> _HeldPart:
    values = as_tensor(local(value), f"[{name!r}]")  # first, as some tensors have not even a shape
    shape, is_cut = tuple(value.shape), is_shard(value)
    box = box_of(value, name) if is_cut else whole(shape)
    there = dtype if dtype is not None and casts(values.dtype, dtype) else values.dtype
    return _HeldPart(values, box, is_cut, shape, there)


def are_plain(values: Iterable[Any]) -> bool:
    """True if these are tensors and parameters of no other class."""
    return _KINDS.issuperset(map(type, values))


def layout_key(values: Sequence[Any]) -> Hashable | None:
    """Return a key that is equal for lists of tensors that differ only in values and addresses.

    Tensors with the same address are distinguished from others, so tied weights match only weights tied in the same
    way.

    Args:
        values: Tensors and any other values.

    Returns:
        The key; None if any value is not a plain tensor with memory.

    Cost: about 1 µs for each tensor.

    Example:
        >>> x, y = torch.ones(2), torch.zeros(2)
        >>> layout_key([x, y]) == layout_key([y, x]), layout_key([x, y]) == layout_key([x, x]), layout_key([x, 5])
        (True, False, None)
    """
    if not are_plain(values):
        return None
    try:
        strides = tuple(map(torch.Tensor.stride, values))
        places = addresses(values)
    except RuntimeError:  # a sparse tensor has no strides
        return None
    if places is None or any(any(map(flag, values)) for flag in _FLAGS):
        return None
    layouts = tuple(map(_layout_of, values))
    if any(layout[0].is_complex for layout in layouts) and any(map(torch.Tensor.is_conj, values)):
        return None
    if 0 in places:  # without elements there is no memory
        places = [place or -id(value) for place, value in zip(places, values, strict=True)]
    first: dict[int, int] = {}
    ties = () if len(set(places)) == len(places) else tuple([first.setdefault(at, i) for i, at in enumerate(places)])
    return layouts, strides, ties


def packed(pieces: Sequence[torch.Tensor], there: torch.device) -> torch.Tensor:
    """Return the bytes of tensors, packed on a device; as a view if nothing has to be packed or moved.

    From a GPU to the CPU they travel in one copy, to pinned memory, which is four times as fast.
    """
    if there.type != "cpu" or pieces[0].device.type not in PINS:
        return packing.pack(pieces, there)
    whole = packing.pack(pieces, pieces[0].device)
    return torch.empty_like(whole, device="cpu", pin_memory=True).copy_(whole)


class _Recipe(NamedTuple):
    """The recipe for sending a state dict, valid for all that are like it.

    Attributes:
        header: The header's bytes.
        shards: The block that this rank holds of each sharded entry, by name.
        order: The number of the value for each entry of the header.
        boxes: The block that this rank holds of each entry.
        dtypes: The dtype of each entry on the wire.
    """

    header: torch.Tensor
    shards: dict[str, Block]
    order: list[int]
    boxes: list[Block]
    dtypes: list[torch.dtype]


_recipes: Recent[_Recipe] = Recent(4)


class Source:
    """The part of a state dict that one rank sends.

    Args:
        state: The entries.
        names: The names to send, and the names under which they travel.
        dtype: The dtype of floating-point tensors on the wire; None means their own.
        about: Further contents of the header.
        ties: The names and their entries that another source has announced; a rank without elements of them cannot
            tell whether two names share memory.

    Raises:
        TypeError: An entry cannot travel; the text has its name.
        ValueError: An entry has too many dimensions, …

    Attributes:
        header: The bytes of a safetensors header for the whole entries. It contains the structure of other values.
        shards: The block that this rank holds of each sharded entry, by name.

    Cost: 4 µs for each entry, and the header; 2 µs for each entry if a state dict like it was sent before.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        names: Mapping[str, str],
        dtype: torch.dtype | None,
        about: Mapping[str, Any],
        ties: Mapping[str, str | None] | None = None,
    ) -> None:
        given = {new: state[name] for name, new in names.items()}
        values, like = list(given.values()), layout_key(list(given.values()))
        key = None if like is None else (like, tuple(given), dtype, json.dumps(about), tuple((ties or {}).items()))
        recipe = None if key is None else _recipes.find(key)
        if recipe is None:
            recipe, values = _prepared(given, dtype, about, ties or {})
            if key is not None and recipe.header.numel() <= LONGEST:  # a key is as large as the header
                _recipes.keep(key, recipe)
        else:
            values = [values[i] for i in recipe.order]
        self.header, self.shards = recipe.header, recipe.shards
        self._recipe, self._values = recipe, [one.detach() if one.requires_grad else one for one in values]

    def load(self, packet: Packet, there: torch.device) -> torch.Tensor:
        """Return the bytes of a packet on a device, as a view if nothing has to be cast, packed or moved."""
        return packed([self._piece(part) for part in packet.parts], there)

    def _piece(self, part: BlockPart) -> torch.Tensor:
        values, box, dtype = self._values[part.entry], self._recipe.boxes[part.entry], self._recipe.dtypes[part.entry]
        piece = values if part.block == box else part.block.within(box).of(values)
        return piece if piece.dtype == dtype else piece.to(dtype)


def _prepared(
    given: Mapping[str, Any], dtype: torch.dtype | None, about: Mapping[str, Any], ties: Mapping[str, str | None]
) -> tuple[_Recipe, list[torch.Tensor]]:
    """Return the recipe, and the values in the order of the header."""
    held: dict[str, _HeldPart] = {}
    first: dict[Any, str] = {}
    keys: dict[str, str | None] = {}
    for name, value in given.items():
        keys[name] = None
        if is_tensor(value):
            one = _held(name, value, dtype)
            keys[name] = key = _tied(name, value, given, ties) or first.setdefault(memory_of(value), name)
            held |= {name: one} if key == name else {}
    extra = {name: given[name] for name, key in keys.items() if key is None}
    structure, tensors = outline.encode(extra, "a state dict", "leave it out with filter=")
    if both := held.keys() & tensors.keys():
        raise ValueError(f"{min(both)} is the name of one entry and the path of another; use rename=")
    held |= {path: _held(path, tensor, None) for path, tensor in tensors.items()}
    kinds = {name: one.values.device.type for name, one in held.items() if not one.values.is_cpu}
    text = json.dumps({"names": keys, "kinds": kinds, "extra": structure, **about})
    encoded, order = _encoded(tuple([(name, one.dtype, one.shape) for name, one in held.items()]), text)
    rows, places = [held[name] for name in order], {name: i for i, name in enumerate(given)}
    recipe = _Recipe(
        torch.frombuffer(bytearray(encoded), dtype=torch.uint8),
        {name: one.box for name, one in held.items() if one.is_cut},
        [places.get(name, -1) for name in order],  # -1: the tensor is inside of an entry; such a recipe is used once
        [one.box for one in rows],
        [one.dtype for one in rows],
    )
    return recipe, [one.values for one in rows]


def _tied(name: str, value: Any, given: Mapping[str, Any], ties: Mapping[str, str | None]) -> str | None:
    """Return the entry of a name that another source has announced, if this rank can have it; None to find out here."""
    if (key := ties.get(name)) is None or key not in given or not is_tensor(given[key]):
        return None
    may_be = not local(value).numel() or not local(given[key]).numel() or memory_of(value) == memory_of(given[key])
    return key if may_be else None


@functools.lru_cache(maxsize=4)
def _encoded(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], text: str) -> tuple[bytes, list[str]]:
    """Return the header of such entries, and their order."""
    shown = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in entries}
    return header.encode(shown, {METADATA: text}), header.order(shown)


def mesh_ranks(state: Mapping[str, Any], names: Iterable[str]) -> list[int]:
    """Return in order the ranks of the world over which entries are sharded; an empty list if none is sharded."""
    if are_plain(map(state.__getitem__, names)):
        return []
    cut = [state[name] for name in names if is_sharded(state[name]) and is_shard(state[name])]
    return sorted({rank for one in cut for rank in one.device_mesh.mesh.flatten().tolist()})
