"""The exchanges of a mixture of experts: tokens to the experts of all ranks, and results back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from easydist.agreement.runner import run
from easydist.base.eager import eager
from easydist.parallel.collectives import AllGatherV, ReduceScatter
from easydist.parallel.members import Members


class Experts(Members):
    """``dispatch`` and ``combine``. In a group of one rank they return the tensors themselves.

    Attributes:
        data_parallel: The ranks of this group whose tokens differ unless sequence parallelism splits them; None means
            the group itself. A layout sets it for the group of experts.
    """

    data_parallel: Members | None = None

    @eager
    def dispatch(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Give every rank the tokens of all ranks, with the router's outputs for them.

        Law: ``hidden_states`` and ``router_logits`` become ``torch.cat([… of rank 0, …])``, and so does each of
        ``extra_tensors``. The ranks may have different numbers of tokens, including none.

        A tensor as the third argument selects vLLM 0.33's form,
        ``dispatch(hidden_states, topk_weights, topk_ids, is_sequence_parallel=False, extra_tensors=None)``.

        Args:
            hidden_states: One row per token of this rank.
            *args: ``router_logits``, likewise. ``is_sequence_parallel``: the tokens are split over all ranks of the
                group (otherwise the ranks of a tensor-parallel group have the same ones, and only ``data_parallel``
                exchanges). ``extra_tensors``: a list of further tensors with one row per token.
            **kwargs: The same arguments by name.

        Returns:
            ``(hidden_states, router_logits)``, or ``(hidden_states, topk_weights, topk_ids)``. With ``extra_tensors``,
            the list of them comes last.

        Raises:
            ValueError: The numbers of rows differ, or an argument has no rows. If that is so on some ranks only, a
                RemoteError on all.

        Cost: one exchange for all tensors.
        """
        call = _Dispatch.of(args, kwargs)
        group = self._exchanging(call.is_sequence_parallel)
        rows = [_rows(tensor) for tensor in (hidden_states, *call.tensors)]
        count, tensors = torch.tensor([rows[0] or 0], device="cpu"), [hidden_states, *call.tensors, *(call.extra or ())]
        verb = AllGatherV([count, *tensors], 0, None)
        verb.operation = "dispatch"
        if None in rows or len({*rows}) > 1:
            verb.refusal = ValueError(
                f"dispatch: each tensor needs one row per token, got {rows} rows; None is no tensor"
            )
        is_free = verb.refusal is None and _are_alone(group, tensors)
        sizes, *gathered = [count, *tensors] if is_free else run(verb, group.communicators)
        self._remember(call.is_sequence_parallel, sizes.tolist())
        number = 1 + len(call.tensors)
        return (*gathered[:number], gathered[number:]) if call.extra is not None else tuple(gathered)

    @eager
    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Any:
        """Call ``dispatch``, of which this is the other name."""
        return self.dispatch(hidden_states, router_logits, is_sequence_parallel, extra_tensors)

    @eager
    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Sum the results of all ranks' experts, and return each rank's own tokens to it.

        Law: ``(hidden_states of rank 0 + …).split(sizes)[rank]``, where ``sizes`` are those of the last ``dispatch`` of
        as many tokens.

        Args:
            hidden_states: One row per token of all ranks, as ``dispatch`` returned them.
            is_sequence_parallel: As in ``dispatch``.

        Raises:
            RuntimeError: There was no ``dispatch`` of that many tokens. If that is so on some ranks only, a RemoteError
                on all.

        Cost: one reduce-scatter.
        """
        return self._combined(hidden_states, [], is_sequence_parallel)

    @eager
    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Do as ``combine``, into a tensor.

        Args:
            hidden_states: As there.
            output: A tensor of the dtype and the shape of the result.
            is_sequence_parallel: As there.

        Returns:
            ``output``.

        Raises:
            ValueError: As in ``reduce_scatterv_into_output``.
        """
        self._combined(hidden_states, [output], is_sequence_parallel)
        return output

    def allocate_combine_input(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_sequence_parallel: bool = False
    ) -> torch.Tensor | None:
        """Return None: ``combine`` takes tensors from anywhere, and needs no memory of its own for them."""
        return None

    def _combined(
        self, hidden_states: torch.Tensor, into: Sequence[torch.Tensor], is_sequence_parallel: bool
    ) -> torch.Tensor:
        known, total = getattr(self, "_dispatched", {}), _rows(hidden_states)
        group, sizes = self._exchanging(is_sequence_parallel), known.get((is_sequence_parallel, total))
        if not into and total is not None and _are_alone(group, [hidden_states]):
            return hidden_states
        verb = ReduceScatter(hidden_states, 0, sizes, True, into)
        verb.operation = "combine"
        if group.world_size > 1 and sizes is None and total is not None:
            verb.refusal = RuntimeError(
                f"combine: there was no dispatch of {total} tokens with is_sequence_parallel={is_sequence_parallel}; "
                f"there was one of {sorted(count for flag, count in known if flag == is_sequence_parallel)}"
            )
        return run(verb, group.communicators)

    def _exchanging(self, is_sequence_parallel: bool) -> Members:
        return self if is_sequence_parallel or self.data_parallel is None else self.data_parallel

    def _remember(self, is_sequence_parallel: bool, sizes: list[int]) -> None:
        self._dispatched: dict[tuple[bool, int], list[int]] = getattr(self, "_dispatched", {})
        self._dispatched[is_sequence_parallel, sum(sizes)] = sizes


def _are_alone(group: Members, tensors: Sequence[Any]) -> bool:
    """True if this rank's tensors are those of the group, so that nothing is copied, and a gradient flows through.

    Raises:
        RuntimeError: The coordinator was destroyed.
    """
    return group.communicators.size == 1 and all(isinstance(tensor, torch.Tensor) for tensor in tensors)


def _rows(tensor: Any) -> int | None:
    """Return the number of a tensor's rows; None if it has none."""
    return len(tensor) if isinstance(tensor, torch.Tensor) and tensor.ndim else None


class _Dispatch(NamedTuple):
    """The arguments of ``dispatch`` after the first, in either form."""

    tensors: list[torch.Tensor]
    is_sequence_parallel: bool
    extra: list[torch.Tensor] | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Dispatch:
        is_newer = "topk_ids" in kwargs or (len(args) > 1 and isinstance(args[1], torch.Tensor))
        bound = (_NEWER if is_newer else _OLDER).bind(*args, **kwargs)
        bound.apply_defaults()
        *tensors, is_sequence_parallel, extra = bound.args
        return cls(tensors, bool(is_sequence_parallel), extra)


def _signature(*names: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    optional = {"is_sequence_parallel": False, "extra_tensors": None}
    parameters = [inspect.Parameter(name, kind) for name in names]
    parameters += [inspect.Parameter(name, kind, default=value) for name, value in optional.items()]
    return inspect.Signature(parameters)


_OLDER, _NEWER = _signature("router_logits"), _signature("topk_weights", "topk_ids")
# ``dispatch`` accepts both forms, and shows the first.
vars(Experts.dispatch)["__signature__"] = inspect.signature(Experts.dispatch_router_logits)
