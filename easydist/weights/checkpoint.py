"""Loading a checkpoint on all ranks while only one rank reads it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.base.eager import eager
from easydist.errors import WireError
from easydist.format.files import load
from easydist.state import communicators
from easydist.typing import Device, Group, Timeout
from easydist.verbs.ranks import named_rank
from easydist.weights.exchange import BUCKET_NBYTES, BroadcastWeights, Sending
from easydist.weights.source import Filter, Rename, state_of
from easydist.weights.target import Wanted

__all__ = ["broadcast_checkpoint"]

_KNOWN = "model", "diffusion_pytorch_model", "adapter_model"
"""The names that transformers, diffusers and peft give to the files of a model, without their endings."""

_INDEX = re.compile(r"\.safetensors\.index(\.[^.]+)?\.json$")
"""The ending of an index; diffusers and transformers put a variant (``fp16``) before ``.json``."""

_SHARD = re.compile(r"-\d+-of-\d+\b")
_SHOWN = 20


@eager
@hiding(src=0)
def broadcast_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | dict[str, Any] | None = None,
    src: int = UNSET,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    filter: Filter = None,
    rename: Rename = None,
    device: Device | None = None,
    pin_memory: bool = False,
    verify: bool = False,
    bucket_bytes: int = BUCKET_NBYTES,
    progress: bool = False,
    group: Group = None,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Load a checkpoint on all ranks, while only one rank reads it.

    Law: after ``broadcast_checkpoint(path, model)`` every rank's model is in the state after
    ``model.load_state_dict(load(path), strict)``.

    The source maps the file, and the bytes go from the mapping to the other ranks unchanged. A model on the meta
    device gets its memory as the values arrive, so no rank ever holds the weights twice. Buffers that are not part of
    the state dict stay on the meta device.

    Example:
        >>> import tempfile, torch, easydist
        >>> from easydist import weights
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> easydist.save(torch.nn.Linear(2, 1).state_dict(), path)
        >>> model = torch.nn.Linear(2, 1, device="meta")
        >>> _ = weights.broadcast_checkpoint(path, model)
        >>> model.weight.device
        device(type='cpu')

    Args:
        path: A ``.safetensors`` file; an index (``model.safetensors.index.json``) with its files beside it; or the
            folder of either. In a folder, the call reads the checkpoint under the name that transformers, diffusers or
            peft gives it (``model``, ``diffusion_pytorch_model``, ``adapter_model``), otherwise the only one, such as a
            single ``model.fp16.safetensors``. Only ``src`` reads it.
        model: The target on every rank: a module, which may be on the meta device or have ``DTensor`` parameters (it
            then gets its shards); a dict of tensors; None for new tensors.
        src: The rank that reads, inside the group. With a group of torch, it must be the same rank of the world.
        strict: As in ``broadcast_state_dict``.
        dtype: The dtype in which floating-point tensors travel, and that of new tensors in a call without a model;
            tensors of a model keep their own. The source decides.
        filter: ``filter(name)`` selects the entries of the file to load; the source decides.
        rename: A function or dict from names in the file to names in the model; the source decides.
        device: The device of new tensors, including those of a model on the meta device; None means the CPU.
        pin_memory: As in ``broadcast_state_dict``.
        verify: As in ``broadcast_state_dict``.
        bucket_bytes: As in ``broadcast_state_dict``.
        progress: As in ``broadcast_state_dict``.
        group: As in ``broadcast_state_dict``.
        group_src: The rank that reads, inside any group.
        check: As in ``broadcast_state_dict``.
        timeout: As in ``broadcast_state_dict``.

    Returns:
        On every rank the updated state dict, as ``broadcast_state_dict`` returns it.

    Raises:
        RemoteError: The source cannot read the checkpoint (``__cause__`` is an OSError or a WireError), or a rank
            cannot load it.
        DisagreementError: As for ``broadcast_state_dict``, including the source's own model.
        OSError: The checkpoint cannot be read, or the folder has none or several (the text lists them), in a world of
            one.
        WireError: The checkpoint is not valid, in a world of one; or as for ``verify``.

    Cost: that of ``broadcast_state_dict``. The source reads each byte of the file once.

    Source: https://huggingface.co/docs/safetensors/index#format; the index is that of ``transformers``.
    """
    wanted = Wanted(None, None, strict, False, device, pin_memory)
    source = named_rank(group, "broadcast_checkpoint", "src", src, group_src)
    verb = _BroadcastCheckpoint(
        path, model, source, wanted, Sending(dtype, bucket_bytes, verify), progress, filter, rename
    )
    return run(verb, communicators(group), timeout, check)


class _BroadcastCheckpoint(BroadcastWeights):
    """A broadcast of the file's entries, which the source receives, too."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        src: int,
        wanted: Wanted,
        sending: Sending,
        shows_progress: bool,
        keep: Filter,
        rename: Rename,
    ) -> None:
        sent = wanted._replace(keep=keep, rename=rename)
        super().__init__("broadcast_checkpoint", model, src, sent, sending, shows_progress)
        self._path, self._received = path, wanted

    def state(self) -> Mapping[str, Any]:
        return checkpoint(self._path)

    def named_source(self) -> str:
        return "the checkpoint"

    def is_receiver(self, rank: int, sources: Sequence[int]) -> bool:
        return True


def checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the entries of a checkpoint, by name, in the memory of the mapped files.

    Raises:
        OSError: A file cannot be read, or a folder does not have one checkpoint.
        WireError: A file is not valid, or the index names an entry that is not there.
        TypeError: The file does not hold a dict.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"broadcast_checkpoint: got {type(path).__name__} as the path; pass broadcast_checkpoint(path, model)"
        )
    path = Path(path)
    if path.is_dir():
        path = _found(path)
    return _indexed(path) if path.suffix == ".json" else state_of(load(path))


def _found(folder: Path) -> Path:
    """Return the index or the file of the checkpoint in a folder.

    Raises:
        FileNotFoundError: There is none, or there are several and none has a known name.
    """
    names = sorted([path.name + "/" * path.is_dir() for path in folder.iterdir()])
    known = [f"{name}.safetensors{ending}" for name in _KNOWN for ending in (".index.json", "")]
    files = [name for name in names if name.endswith(".safetensors") and not _SHARD.search(name)]
    whole = [name for name in names if _INDEX.search(name)] + files
    if first := [name for name in known if name in whole] or (whole if len(whole) == 1 else []):
        return folder / first[0]
    if whole:
        text = f"several checkpoints are in this folder: {_listed(whole)}; pass the path of one of them"
    else:
        there = _listed(names) or "nothing"
        text = f"no safetensors checkpoint is in this folder, which has {there}; pass the path of one"
    raise FileNotFoundError(errno.ENOENT, text, os.fspath(folder))


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_SHOWN], *([f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])])


def _indexed(path: Path) -> dict[str, Any]:
    places = _weight_map(path)
    files = {name: load(path.parent / name) for name in dict.fromkeys(places.values())}
    if lost := [name for name, file in places.items() if name not in files[file]]:
        raise WireError(f"{path} says that {lost[0]!r} is in {places[lost[0]]}, but it is not")
    return {name: files[file][name] for name, file in places.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Return the name of each entry's file, after making sure that it is in the index's own folder."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"{path} is not an index of safetensors files: it has no weight_map") from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise WireError(f"{path}: weight_map is not an object of file names")
    if outside := [file for file in places.values() if os.path.basename(file) != file or file in ("", ".", "..")]:
        raise WireError(f"{path} names {outside[0]!r}, which is not a file next to it")
    return places
