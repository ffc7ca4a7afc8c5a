"""Sending a tensor that all ranks of a stage have: each sends a share of it, and the receivers gather the shares.

The tensor then crosses between hosts once instead of once per rank. On one host this costs more than it saves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from easydist import memory, tree
from easydist.errors import DisagreementError
from easydist.format import outline
from easydist.format.header import Header
from easydist.groups.communicators import Communicators
from easydist.parallel.members import Members
from easydist.typing import Tree
from easydist.verbs.gather import gather
from easydist.verbs.tensor_dict_messages import Incoming

METADATA = "easydist.shares"


class Terms(NamedTuple):
    """The arguments on which both sides must agree.

    Attributes:
        size: The number of gathering ranks; 1 without an ``all_gather_group``.
        asked: By key: True to send the tensor in shares, False not to.
    """

    size: int
    asked: dict[str, bool]

    @classmethod
    def of(cls, group: Any, asked: Mapping[str, bool] | None) -> Terms:
        """Return the terms of a call.

        Raises:
            TypeError: ``group`` is no coordinator, or ``asked`` no dict.
        """
        if not isinstance(group, Members | None):
            raise TypeError(f"all_gather_group has to be a GroupCoordinator, got {type(group).__name__}")
        if not isinstance(asked, Mapping | None):
            raise TypeError(f"all_gather_tensors has to be a dict from keys to True or False, got {asked!r}")
        size = 1 if group is None else group.world_size
        return cls(
            size, dict(sorted((str(key), bool(value)) for key, value in (asked or {}).items())) if size > 1 else {}
        )

    def check(self, theirs: Any, src: int, rank: int) -> None:
        """Make sure that the sender passed the same arguments.

        Raises:
            DisagreementError: It did not.
        """
        sender = Terms(*(theirs or (1, {})))
        if sender != self:
            raise DisagreementError(
                "recv_tensor_dict: the two ranks disagree on the all-gather\n"
                f"  rank {src} sends with {sender._text}\n  rank {rank} receives with {self._text}\n"
                "Pass all_gather_group of one size and the same all_gather_tensors on both sides, or on neither."
            )

    @property
    def _text(self) -> str:
        if self.size == 1:
            return "no all_gather_group"
        asked = f" and all_gather_tensors={self.asked}" if self.asked else ""
        return f"an all_gather_group of {self.size} ranks{asked}"


def saves_bytes(here: str, there: str, gathering: Sequence[str]) -> bool:
    """True if the data goes to another host, and all ranks that send shares are on this one.

    Args:
        here: This rank's host.
        there: The receiver's host.
        gathering: The hosts of the ranks that send shares.
    """
    return here != there and set(gathering) == {here}


def cut(data: Tree, terms: Terms, rank: int, by_default: bool) -> tuple[Tree, dict[str, list[int]]]:
    """Return the tree with this rank's shares in place of tensors, and the shapes of these tensors by path.

    Args:
        data: The tree.
        terms: The call's terms.
        rank: The rank of this process among those that gather.
        by_default: True to cut tensors that ``terms`` does not name.
    """
    shapes: dict[str, list[int]] = {}
    if terms.size == 1 or not (by_default or any(terms.asked.values())):
        return data, shapes
    leaves, spec = tree.flatten(data, lambda value: isinstance(value, torch.Tensor) or outline.is_object(value))
    shares: dict[int, torch.Tensor] = {}
    for i, (leaf, path) in enumerate(zip(leaves, spec.paths, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            continue
        if terms.asked.get(_key(path), by_default) and leaf.numel() and leaf.numel() % terms.size == 0:
            shapes[path] = list(leaf.shape)
            if id(leaf) not in shares:
                shares[id(leaf)] = leaf.detach().contiguous().reshape(terms.size, -1)[rank]
            leaves[i] = shares[id(leaf)]
    return (spec.rebuild(leaves), shapes) if shapes else (data, shapes)


def _key(path: str) -> str:
    """Return the key by which ``all_gather_tensors`` names a leaf: its dict key, or its path if it lies deeper."""
    text = path[2:-2]
    return text if path == f"[{text!r}]" else path


class IncomingShares(Incoming):
    """A tree with some tensors as shares. ``gather`` completes them."""

    _shares: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def allocate(self, comms: Communicators, head: Header) -> Any:
        """Allocate as ``Incoming`` does: the whole tensors for the tree, and the shares for the messages."""
        receiving, tensors = super().allocate(comms, head)
        shapes: dict[str, list[int]] = json.loads(head.metadata.get(METADATA, "{}"))
        self._shares = []
        for entry in head.entries:
            if (shape := shapes.get(self.path_of(entry.name))) is not None:
                share = tensors[entry.name]
                whole = tensors[entry.name] = memory.empty(torch.Size(shape), entry.dtype, share.device)
                self._shares = [*self._shares, (whole, share)]
        return receiving, tensors

    @property
    def has_shares(self) -> bool:
        """True if ``gather`` exchanges anything."""
        return bool(self._shares)

    def gather(self, group: Any) -> None:
        """Complete the tensors once all shares have arrived. All ranks of ``group`` call it."""
        shares, self._shares = self._shares, ()
        if shares:
            every = gather([share for _, share in shares], group=group)
            for (whole, _), flat in zip(shares, every, strict=True):
                whole.view(-1).copy_(flat)
