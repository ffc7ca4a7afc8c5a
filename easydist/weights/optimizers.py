"""Optimizers whose state is sent: the description that tells whether a receiver fits, and the loading of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from easydist.data.packing import type_text
from easydist.verbs.sharded import is_sharded


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


def differing(theirs: Mapping[str, Any] | None, optimizer: Optimizer) -> list[tuple[str, str, str]]:
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


def load_exactly(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
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
