"""Seeding random number generators, and copying their states between ranks."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.arguments import integer
from easydist.base.eager import eager
from easydist.groups.communicators import Communicators
from easydist.state import ProcessState, communicators
from easydist.typing import Group, Timeout
from easydist.verbs.objects import BroadcastObjectList

__all__ = ["set_seed", "synchronize_rng_states"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed ``random``, NumPy and torch (the CPU and every accelerator).

    Args:
        seed: The seed, an integer of at most 64 bits.
        device_specific: Add the process index, so that every process draws different numbers.
        deterministic: Also make torch use deterministic algorithms if it has them.

    Raises:
        TypeError: ``seed`` is not an integer; nothing was seeded.
        ValueError: It has more than 64 bits; nothing was seeded.

    Example:
        >>> import torch, easydist
        >>> def draw(seed):
        ...     easydist.set_seed(seed)
        ...     return torch.rand(1)
        >>> bool(draw(1) == draw(1))
        True

    Source: accelerate's ``set_seed``.
    """
    seed = integer("set_seed: seed", seed, "a seed")
    last = seed + (ProcessState().num_processes - 1 if device_specific else 0)
    if not -(2**63) <= seed <= last < 2**64:  # the same on all ranks
        raise ValueError(f"set_seed: {seed if seed < 0 else last} has more than 64 bits; choose a smaller seed")
    if device_specific:
        seed += ProcessState().process_index
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


class _Generator(NamedTuple):
    """The functions that read and set the state of a generator."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _generators(generator: torch.Generator | None, asked: Iterable[str]) -> dict[str, _Generator]:
    """Return the generators of this process; that of XLA only on request, because its library is large."""
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
    if "xla" in asked and importlib.util.find_spec("torch_xla") is not None:
        xla = importlib.import_module("torch_xla.core.xla_model")
        found["xla"] = _Generator(xla.get_rng_state, xla.set_rng_state)
    return found


@eager
def synchronize_rng_states(
    rng_types: Sequence[str] | None = None,
    generator: torch.Generator | None = None,
    *,
    group: Group = None,
    timeout: Timeout | None = None,
) -> None:
    """Give every process the random number generator states of rank 0.

    Args:
        rng_types: Some of ``"torch"``, ``"cuda"``, ``"xpu"``, ``"npu"``, ``"xla"``, ``"numpy"``, ``"python"``,
            ``"generator"``; None for all that this process has, except ``"xla"``.
        generator: The generator that ``"generator"`` stands for.
        group: The ranks that take part.
        timeout: The time limit of the call; None is the group's.

    Raises:
        TypeError: ``rng_types`` is a single name, or ``generator`` is not a ``torch.Generator``.
        ValueError: This process has no such generator; none was changed.

    Example:
        >>> import easydist
        >>> easydist.synchronize_rng_states(["torch", "numpy", "python"])

    Cost: that of ``broadcast_object_list``: one header exchange, and a broadcast if the states are too large for it.

    Source: accelerate's ``synchronize_rng_states``.
    """
    run(_SynchronizeRngStates(rng_types, generator), communicators(group), timeout)


class _SynchronizeRngStates(BroadcastObjectList):
    operation = "synchronize_rng_states"

    def __init__(self, rng_types: Sequence[str] | None, generator: torch.Generator | None) -> None:
        super().__init__([], 0, weights_only=True)
        self._rng_types, self._generator = rng_types, generator

    def prepare(self, comms: Communicators) -> Call:
        asked = self._rng_types
        if asked is not None and (isinstance(asked, str) or not isinstance(asked, Iterable)):
            raise TypeError(f"synchronize_rng_states: rng_types={asked!r} is not a list of names; pass [{asked!r}]")
        names = [str(getattr(kind, "value", kind)) for kind in asked or ()]
        given: object = self._generator
        if not isinstance(given, torch.Generator | None):
            kind = type(given)
            got = f"{kind.__module__}.{kind.__qualname__}"  # NumPy's class has the same name
            raise TypeError(f"synchronize_rng_states: generator= takes a torch.Generator, got {got}")
        known = _generators(self._generator, names)
        names = list(known) if asked is None else names
        if missing := [name for name in names if name not in known]:
            hint = "; pass generator= as well" if missing == ["generator"] else ""
            raise ValueError(f"synchronize_rng_states: no {', '.join(missing)} here; there is {', '.join(known)}{hint}")
        self._chosen = [known[name] for name in names]
        self._values = [one.read() for one in self._chosen]
        call = super().prepare(comms)
        call.arguments = {"rng_types": names}
        return call

    def result(self, comms: Communicators, agreed: Agreement, arrived: torch.Tensor | None) -> list[Any]:
        states = super().result(comms, agreed, arrived)
        for one, state in zip(self._chosen, states, strict=True):
            one.write(state)
        return states
