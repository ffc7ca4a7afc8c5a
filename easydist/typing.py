"""Names for the types in easydist's signatures."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from easydist.comms import TorchComm

Tree: TypeAlias = Any
"""Nested containers; the leaves are tensors, NumPy arrays and scalars, Python numbers."""

Device: TypeAlias = str | int | torch.device
"""What ``torch.device`` takes."""

Timeout: TypeAlias = timedelta | float
"""A ``timedelta``, or seconds."""

Group: TypeAlias = Union["dist.ProcessGroup", "DeviceMesh", "TorchComm", None]
"""The ranks that take part: None (all of them), a ProcessGroup, a DeviceMesh of one dimension, a TorchComm."""
