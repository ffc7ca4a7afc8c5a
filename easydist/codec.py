"""Any Python object as bytes, and back."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def encode(value: object) -> torch.Tensor:
    """``value`` as a uint8 tensor on the CPU: pickle, protocol 5.

    Raises:
        TypeError: ``value`` holds something that pickle cannot write; pickle's own text is inside.
    """
    try:
        data = pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{type(value).__name__} cannot be pickled: {error}") from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(buffer: torch.Tensor) -> Any:
    """The object that ``encode`` wrote.

    Example:
        >>> decode(encode({"a": [1, None]}))
        {'a': [1, None]}
    """
    return pickle.loads(buffer.numpy().data)
