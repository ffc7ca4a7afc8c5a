"""How layers and tensors are cut into the parts of ranks, under vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

_PARTITION = "VLLM_PP_LAYER_PARTITION"


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Check that a number is a multiple of another one.

    Args:
        numerator: The number that has to be a multiple.
        denominator: The other number.

    Raises:
        ValueError: It is not.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of two numbers.

    Args:
        numerator: The number to divide.
        denominator: The number of parts.

    Raises:
        ValueError: The division leaves a remainder.

    Example:
        >>> from easydist.parallel import divide
        >>> divide(12, 4)
        3
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def verify_group_size_divides_partition(
    input_size_per_partition: int, group_size: int, layer_name: str | None = None, extra_suggestion: str = ""
) -> None:
    """Check that a rank's part of a layer consists of whole quantization groups.

    Args:
        input_size_per_partition: The size of the part.
        group_size: The size of a quantization group.
        layer_name: The name of the layer, for the error.
        extra_suggestion: Further advice, which continues the error's last sentence.

    Raises:
        ValueError: It does not.
    """
    if input_size_per_partition % group_size:
        of = f" of {layer_name}" if layer_name else ""
        raise ValueError(
            f"each rank's part{of} has {input_size_per_partition} inputs, which do not make whole quantization groups "
            f"of {group_size}. Use fewer tensor-parallel ranks{extra_suggestion}."
        )


def is_weak_contiguous(inp: torch.Tensor) -> bool:
    """True if a tensor's values fill one block of memory in any order, which reaches to the end of its storage.

    Example:
        >>> import torch
        >>> from easydist.parallel import is_weak_contiguous
        >>> x = torch.ones(2, 3)
        >>> is_weak_contiguous(x.t()), is_weak_contiguous(x[:, :2])
        (True, False)

    Args:
        inp: The tensor.
    """
    rest = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return inp.is_contiguous() or rest == inp.nbytes


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Return equal parts of a tensor along its last dimension.

    Args:
        tensor: The tensor.
        num_partitions: The number of parts.
        contiguous_split_chunks: Copy each part into memory of its own.

    Raises:
        ValueError: The last dimension cannot be cut into so many equal parts.
    """
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple([part.contiguous() for part in parts]) if contiguous_split_chunks else parts


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Return the first layer of a pipeline stage, and the first one after it.

    All stages get the same number of layers. Those that are left over go to the stages before the last, from the back,
    because the last one also has the head. ``VLLM_PP_LAYER_PARTITION=5,7,4`` sets the number of each stage.

    Args:
        num_hidden_layers: The number of layers.
        pp_rank: The stage.
        pp_size: The number of stages.

    Raises:
        ValueError: The variable is not a list of ``pp_size`` numbers with the sum ``num_hidden_layers``.

    Example:
        >>> from easydist.parallel import get_pp_indices
        >>> [get_pp_indices(10, stage, 4) for stage in range(4)]
        [(0, 2), (2, 5), (5, 8), (8, 10)]
    """
    rest = num_hidden_layers % pp_size
    counts = [num_hidden_layers // pp_size + (1 <= pp_size - 1 - stage <= rest) for stage in range(pp_size)]
    if asked := os.environ.get(_PARTITION):
        counts = _asked(asked, num_hidden_layers, pp_size)
    start = sum(counts[:pp_rank])
    return start, start + counts[pp_rank]


def _asked(text: str, layers: int, stages: int) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) != stages or sum(counts) != layers:
        raise ValueError(f"{_PARTITION}={text} is not a list of {stages} numbers whose sum is {layers}, the layers")
    return counts
