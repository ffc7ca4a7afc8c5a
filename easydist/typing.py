"""The types in easydist's signatures."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, Union

import torch

if TYPE_CHECKING:
    import numpy as np
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Tree: TypeAlias = Any
"""Nested containers; the leaves are tensors, NumPy arrays and scalars, and Python numbers."""

T = TypeVar("T")
"""The type of a tree, for verbs that return the same type."""

Item = TypeVar("Item", bound="np.generic")
"""The type of an array's elements."""

Reduction: TypeAlias = Union[
    Literal["mean", "sum", "max", "min", "prod", "and", "or", "xor", "none"],
    Literal["MEAN", "SUM", "MAX", "MIN", "PROD", "AND", "OR", "XOR", "NONE"],
    "dist.ReduceOp",
    "dist.ReduceOp.RedOpType",
]
"""The ways in which ``reduce`` combines the ranks' values."""

Device: TypeAlias = str | int | torch.device
"""The types that ``torch.device`` takes."""

Timeout: TypeAlias = timedelta | float
"""A ``timedelta``, or seconds."""


class Comm(Protocol):
    """A ``TorchComm`` for type checkers: the class itself is in a higher layer. Verbs take no other class."""

    @property
    def communicators(self) -> object:
        """The verbs' own state of the group, which communicators of other libraries do not have."""

    def get_backend(self) -> str:
        """Return the backend's name."""

    def get_device(self) -> torch.device:
        """Return the device on which the tensors have to be."""

    def get_name(self) -> str:
        """Return the name of the group."""

    def get_rank(self) -> int:
        """Return this process's rank in the group."""

    def get_size(self) -> int:
        """Return the number of processes in the group."""


class Coordinator(Protocol):
    """A ``GroupCoordinator`` for type checkers, easydist's own or vLLM's."""

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """The group for data on the CPU."""


Group: TypeAlias = Union["dist.ProcessGroup", "DeviceMesh", Comm, Coordinator, None]
"""The ranks that take part, as None (all of them), a ProcessGroup, a DeviceMesh of one dimension, a TorchComm or a
GroupCoordinator."""
