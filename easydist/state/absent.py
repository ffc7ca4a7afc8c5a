"""The names, of accelerate's state and of other libraries, that ``ProcessState`` does not have, and what to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_OF_ACCELERATOR = "it belongs to accelerate's AcceleratorState; ask that, or the Accelerator"
_ABSENT = {
    "_shared_state": (
        "easydist creates nothing when a state is made, so a script needs no check before it reads num_processes or "
        "use_distributed; ProcessState().initialized is always true"
    ),
    "_known_attrs": "every attribute is a property; dir(ProcessState) lists them",
    "_cpu": "use ProcessState().device.type == 'cpu'",
    "_goes_first": "use main_process_first() or local_main_process_first()",
    "_prepare_backend": "ProcessState().backend is the backend, and ProcessState(backend=…) chooses it",
    "default_device": "use ProcessState().device",
    "set_device": "the device is chosen with the state; ProcessState().device = … changes it",
    "barrier": "use wait_for_everyone()",
    "local_rank": "use local_process_index",
    "rank": "use process_index",
    "size": "use num_processes",
    "world_size": "use num_processes",
    "fork_launched": "read the variable FORK_LAUNCHED, which accelerate's notebook_launcher sets",
    **dict.fromkeys(
        (
            "_mixed_precision",
            "mixed_precision",
            "deepspeed_plugin",
            "deepspeed_plugins",
            "device_mesh",
            "dynamo_plugin",
            "fsdp_plugin",
            "is_fsdp2",
            "megatron_lm_plugin",
            "parallelism_config",
            "torch_tp_plugin",
        ),
        _OF_ACCELERATOR,
    ),
}


def absent(owner: object, name: str) -> AttributeError:
    """Return the error for a name that a state does not have."""
    advice = f": {_ABSENT[name]}" if name in _ABSENT else ""
    return AttributeError(f"ProcessState (PartialState) has no attribute {name!r}{advice}", name=name, obj=owner)


class WithAdvice(type):
    """The metaclass of a state: names in the table raise an ``AttributeError`` with advice.

    Example:
        >>> from easydist import PartialState
        >>> PartialState._cpu
        Traceback (most recent call last):
        AttributeError: ProcessState (PartialState) has no attribute '_cpu': use ProcessState().device.type == 'cpu'
    """

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(cls, name: str) -> Any:
            raise absent(cls, name)

        def __setattr__(cls, name: str, value: object) -> None:
            if name in _ABSENT:  # a script would change what nothing reads
                raise absent(cls, name)
            super().__setattr__(name, value)
