"""The decorator for tests whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from easydist.testing.pool import default_pool


def distributed(world_size: int | Sequence[int] = 2, *, timeout: float | None = None) -> Callable[..., Any]:
    """Decorate a test function to run on every rank of a fresh gloo group.

    The function may have the parameters ``rank`` and ``world_size``. All its other parameters are pytest's (fixtures,
    ``parametrize``), or hypothesis' (``@given`` goes above ``@distributed``, so that all ranks see the same example),
    and must be picklable. ``monkeypatch`` is refused, since nothing would undo its changes in the ranks.

    Args:
        world_size: The number of ranks; several numbers create one test each.
        timeout: Seconds; None means the pool's.

    Example:
        >>> import torch, easydist
        >>> @distributed(world_size=4)
        ... def test_gather_concatenates_in_rank_order(rank):
        ...     assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(fn):
            raise TypeError(f"@distributed: {fn.__name__} is async; make it a function that calls asyncio.run")
        signature = _outer_signature(fn, several=not isinstance(world_size, int))

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            size = given.pop("world_size", world_size)
            _refuse_monkeypatch(given)
            default_pool().run_with(wrapper, size, (), given, timeout)

        vars(wrapper).update(each_rank=fn, __signature__=signature)
        del wrapper.__wrapped__  # pytest would take the signature of the inner function
        return wrapper if isinstance(world_size, int) else _parametrized(wrapper, world_size)

    return decorate


def _refuse_monkeypatch(given: Mapping[str, Any]) -> None:
    """Raise an error for a fixture that can be sent to the ranks, but would undo nothing there."""
    if names := [name for name, value in given.items() if type(value).__name__ == "MonkeyPatch"]:
        raise TypeError(
            f"{names[0]}= belongs to the process of pytest, and would not undo its changes in the ranks: write "
            "`with pytest.MonkeyPatch.context() as patch:` in the test"
        )


def _outer_signature(fn: Callable[..., Any], several: bool) -> inspect.Signature:
    signature = inspect.signature(fn)
    outer = [p for name, p in signature.parameters.items() if name not in ("rank", "world_size")]
    if several:
        outer.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=outer)


def _parametrized(wrapper: Callable[..., Any], world_sizes: Sequence[int]) -> Callable[..., Any]:
    import pytest

    test: Callable[..., Any] = pytest.mark.parametrize("world_size", world_sizes, ids="W={}".format)(wrapper)
    return test
