"""The models and dicts that receive: their entries, which of them are written in place, and how they take the rest."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from easydist.format import outline
from easydist.weights.source import local, state_of


def memory_of(value: Any) -> Any:
    """What is equal for entries that are the same memory, such as tied weights."""
    return outline.memory_of(local(value) if isinstance(value, torch.Tensor) else value)


class Entries:
    """A dict that receives.

    Attributes:
        values: By name, what is there now.
        own: The names that are memory of its own; None: all.
    """

    own: frozenset[str] | None = None

    def __init__(self, into: Any) -> None:
        self._into = into
        self.values: dict[str, Any] = {} if into is None else dict(state_of(into))

    def is_writable(self, name: str) -> bool:
        """Whether the tensor of that name is written in place."""
        value = self.values.get(name)
        return isinstance(value, torch.Tensor) and not value.is_meta and (self.own is None or name in self.own)

    def fill(self, arrived: Mapping[str, Any], only: Container[str] | None) -> Any:
        """Take what was not written in place.

        Args:
            arrived: By name; new tensors, and what is no tensor.
            only: The names that stay; None: all.

        Returns:
            The state dict as it is now.
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
    """A module that receives.

    Entries that its hooks make of its parameters, and those that are no tensors, go through its ``load_state_dict``;
    tensors on the meta device are replaced, and tied ones stay tied.
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


def _is_one(own: torch.Tensor, value: Any) -> bool:
    """Whether an entry of the state dict is the module's tensor itself, not something that was made of it."""
    if not isinstance(value, torch.Tensor) or (own.dtype, own.shape) != (value.dtype, value.shape):
        return False
    return (own.is_meta and value.is_meta) or memory_of(own) == memory_of(value) or own.numel() == 0


def _like(own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(values, own.requires_grad) if isinstance(own, nn.Parameter) else values


def entries_of(into: Any) -> Entries:
    """The entries of what receives.

    Raises:
        TypeError: It is neither a module nor a dict, or a name is no text.
    """
    return _Model(into) if isinstance(into, nn.Module) else Entries(into)
