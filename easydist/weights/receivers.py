"""Receivers (models, optimizers, dicts): their entries, which are written in place, and how they store the rest.

An optimizer's description tells whether it fits the one that is sent.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from easydist.agreement.disagreement import Row
from easydist.data.packing import type_text
from easydist.verbs.sharded import is_sharded
from easydist.weights.shards import is_tensor, local, memory_of
from easydist.weights.source import state_of


class Entries:
    """A dict that receives entries.

    Attributes:
        values: The current values, by name.
        own: The names whose values are memory of the target itself; None means all.
    """

    own: frozenset[str] | None = None

    def __init__(self, into: Any) -> None:
        self._into = into
        self.values: dict[str, Any] = {} if into is None else dict(state_of(into))

    def is_writable(self, name: str) -> bool:
        """True if the tensor of that name is written in place."""
        value = self.values.get(name)
        return is_tensor(value) and not value.is_meta and (self.own is None or name in self.own)

    def misfit(self, theirs: Mapping[str, Any] | None) -> list[Row]:
        """Return the differences that names and types do not show, as (what, there, here).

        Args:
            theirs: The description of the source's optimizer, if it sends one.
        """
        return []

    def fill(self, arrived: Mapping[str, Any], only: Container[str] | None) -> Any:
        """Store the entries that were not written in place.

        Args:
            arrived: New tensors, and values that are not tensors, by name.
            only: The names to keep; None means all.

        Returns:
            The updated state dict.
        """
        if self._into is None:
            return dict(arrived)
        if not arrived and only is None:
            return self._into
        if not isinstance(self._into, MutableMapping):
            return {**self._into, **arrived}
        for name in [name for name in self._into if only is not None and name not in only]:
            del self._into[name]
        self._into.update(arrived)
        return self._into


class _Model(Entries):
    """A module that receives entries.

    Entries that its hooks compute from its parameters, and those that are not tensors, go through its
    ``load_state_dict``. Tensors on the meta device are replaced, and tied ones stay tied.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._module = module
        self._own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._own |= dict(module.named_buffers(remove_duplicate=False))
        self._own = {name: one for name, one in self._own.items() if _is_one(one, self.values.get(name))}
        self.values |= self._own
        self.own = frozenset(self._own)

    def fill(self, arrived: Mapping[str, Any], only: Container[str] | None) -> Any:
        on_meta = {name: one for name, one in self._own.items() if one.is_meta}
        filled = {id(on_meta[name]): _like(on_meta[name], arrived[name]) for name in arrived if name in on_meta}
        assigned = {name: filled[id(one)] for name, one in on_meta.items() if id(one) in filled}
        rest = {name: value for name, value in arrived.items() if name not in assigned}
        if assigned:
            self._module.load_state_dict(assigned, strict=False, assign=True)
        if rest:
            self._module.load_state_dict(rest, strict=False)
        return self._module.state_dict()


class _Optimizer(Entries):
    """An optimizer that receives a state, which replaces its own."""

    own = frozenset()

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.state_dict())
        self._optimizer = optimizer

    def misfit(self, theirs: Mapping[str, Any] | None) -> list[Row]:
        return _differing(theirs, self._optimizer)

    def fill(self, arrived: Mapping[str, Any], only: Container[str] | None) -> Any:
        return _load_exactly(self._optimizer, {**self.values, **arrived})


def _is_one(own: torch.Tensor, value: Any) -> bool:
    """True if an entry of the state dict is the module's tensor itself, not something computed from it."""
    if is_lazy(own):
        return True
    if not isinstance(value, torch.Tensor) or (own.dtype, own.shape) != (value.dtype, value.shape):
        return False
    return (own.is_meta and value.is_meta) or memory_of(own) == memory_of(value) or local(own).numel() == 0


def _like(own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(values, own.requires_grad) if isinstance(own, nn.Parameter) else values


def entries_of(into: Any) -> Entries:
    """Return the entries of a receiving module, optimizer or dict.

    Raises:
        TypeError: It is none of these, or a name is not a string.
    """
    if isinstance(into, Optimizer):
        return _Optimizer(into)
    return _Model(into) if isinstance(into, nn.Module) else Entries(into)


def described(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class of an optimizer, and the name, dtype and shape of each parameter of each group.

    Raises:
        TypeError: A parameter is sharded, or has no memory, so its state cannot be sent or received.

    Example:
        >>> described(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 3))]))
        {'class': 'SGD', 'groups': [[['', 'float32 (2, 3)']]]}
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(map(is_sharded, params)):
        raise TypeError(
            "the optimizer has a parameter that is a DTensor; its state cannot be sent or received. Convert it with "
            "torch.distributed.checkpoint.state_dict"
        )
    if any(param.is_meta for param in params):
        raise TypeError("the optimizer has a parameter on the meta device; make the optimizer after model.to_empty")
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # accelerate's wrapper
        optimizer = inner
    return {"class": type(optimizer).__qualname__, "groups": [_parameters(group) for group in optimizer.param_groups]}


def _parameters(group: Mapping[str, Any]) -> list[list[str]]:
    names = group.get("param_names") or [""] * len(group["params"])
    types = [type_text(one.dtype, one.shape) for one in group["params"]]
    return [[name, text] for name, text in zip(names, types, strict=True)]


def _differing(theirs: Mapping[str, Any] | None, optimizer: Optimizer) -> list[Row]:
    """Return the differences between the source's optimizer and a receiver's, as (what, there, here).

    Args:
        theirs: The description of the source's optimizer; None if the source sends no optimizer.
        optimizer: The receiver's.

    Raises:
        TypeError: As for ``described``.
    """
    mine = described(optimizer)
    if theirs is None or theirs["class"] != mine["class"]:
        return [("the optimizer", "none" if theirs is None else theirs["class"], mine["class"])]
    ours, others = mine["groups"], theirs["groups"]
    if len(ours) != len(others):
        return [("param_groups", f"{len(others)} groups", f"{len(ours)} groups")]
    rows = []
    for i, (other, own) in enumerate(zip(others, ours, strict=True)):
        if len(other) != len(own):
            rows.append((f"param_groups[{i}]", f"{len(other)} parameters", f"{len(own)} parameters"))
            continue
        pairs = enumerate(zip(other, own, strict=True))
        rows += [(f"param_groups[{i}]['params'][{j}]", *_texts(*pair)) for j, pair in pairs if _differ(*pair)]
    return rows


def _differ(other: list[str], own: list[str]) -> bool:
    """True if two parameters have different types, or different names if both have one."""
    return other[1] != own[1] or ("" not in (other[0], own[0]) and other[0] != own[0])


def _texts(other: list[str], own: list[str]) -> tuple[str, str]:
    return " ".join(filter(None, other)), " ".join(filter(None, own))


def _load_exactly(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Give an optimizer exactly this state, and return its state dict.

    ``load_state_dict`` by itself casts the state to the dtypes of the parameters, and changes text.
    """
    optimizer.load_state_dict(dict(state))
    loaded = optimizer.state_dict()
    for key, values in state["state"].items():
        mine = loaded["state"].get(key)
        if isinstance(mine, dict):
            mine.update(_placed(values, mine))
    return loaded


def _placed(sent: Any, loaded: Any) -> Any:
    """Return what was sent, with each tensor on the device on which it was loaded."""
    if isinstance(sent, torch.Tensor):
        return sent.to(loaded.device) if isinstance(loaded, torch.Tensor) else sent
    if isinstance(sent, dict) and isinstance(loaded, dict):
        return {key: _placed(one, loaded.get(key)) for key, one in sent.items()}
    if isinstance(sent, list | tuple) and isinstance(loaded, list | tuple) and len(sent) == len(loaded):
        return type(sent)([_placed(one, other) for one, other in zip(sent, loaded, strict=True)])
    return sent
