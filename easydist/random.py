"""Random number generators, seeded alike and kept in step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist.agree import Call, agree
from easydist.calling import calling
from easydist.eager import eager
from easydist.objects import broadcast_object_list
from easydist.state import ProcessState, communicators
from easydist.typing import Group

__all__ = ["set_seed", "synchronize_rng_states"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed ``random``, NumPy and torch (the CPU and every accelerator).

    Args:
        seed: The seed.
        device_specific: Add the process index, so that every process draws other numbers.
        deterministic: Also make torch use deterministic algorithms where it has them.

    Example:
        >>> import torch, easydist
        >>> def draw(seed):
        ...     easydist.set_seed(seed)
        ...     return torch.rand(1)
        >>> bool(draw(1) == draw(1))
        True

    Source: accelerate's ``set_seed``.
    """
    if device_specific:
        seed += ProcessState().process_index
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


class _Generator(NamedTuple):
    """How the state of a generator is read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _generators(generator: torch.Generator | None) -> dict[str, _Generator]:
    """Those that exist in this process."""
    found = {
        "torch": _Generator(torch.get_rng_state, torch.set_rng_state),
        "numpy": _Generator(np.random.get_state, np.random.set_state),
        "python": _Generator(random.getstate, random.setstate),
    }
    for name in ("cuda", "xpu", "npu", "mlu", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            found[name] = _Generator(module.get_rng_state, module.set_rng_state)
    if generator is not None:
        found["generator"] = _Generator(generator.get_state, generator.set_state)
    return found


@eager
def synchronize_rng_states(
    rng_types: Sequence[str] | None = None, generator: torch.Generator | None = None, *, group: Group = None
) -> None:
    """Give every process the random number generator states of rank 0.

    Args:
        rng_types: Of ``"torch"``, ``"cuda"``, ``"xpu"``, ``"npu"``, ``"numpy"``, ``"python"``, ``"generator"``; None
            means all that this process has.
        generator: The one that ``"generator"`` means.
        group: The ranks that take part.

    Raises:
        ValueError: There is no such generator here; none was changed.

    Example:
        >>> import easydist
        >>> easydist.synchronize_rng_states(["torch", "numpy", "python"])

    Cost: one header exchange, and that of ``broadcast_object_list``.

    Source: accelerate's ``synchronize_rng_states``.
    """
    known: dict[str, _Generator] = {}
    names: list[str] = []

    def prepare() -> Call:
        known.update(_generators(generator))
        names.extend(known if rng_types is None else [str(getattr(kind, "value", kind)) for kind in rng_types])
        if missing := [name for name in names if name not in known]:
            hint = "; pass generator= as well" if missing == ["generator"] else ""
            raise ValueError(f"synchronize_rng_states: no {', '.join(missing)} here; there is {', '.join(known)}{hint}")
        return Call({"rng_types": names})

    with calling(communicators(group), "synchronize_rng_states") as comms:
        agree(comms, "synchronize_rng_states", prepare)
    states = broadcast_object_list([known[name].read() for name in names], group=group)
    for name, state in zip(names, states, strict=True):
        known[name].write(state)
