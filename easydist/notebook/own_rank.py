"""A rank's part in its cluster: process groups, created and renewed with the other ranks, and values to exchange."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store

from easydist.base import torch_groups
from easydist.base.wording import a_or_an
from easydist.errors import UnsafeObjectError
from easydist.groups.connecting import connect
from easydist.groups.known import forget
from easydist.groups.rendezvous import Rendezvous
from easydist.liveness.stored import decoded
from easydist.liveness.timed_store import reached
from easydist.notebook.values import is_plain, pack, unpack
from easydist.process_group import NAME, SharedMemoryGroup
from easydist.state import ProcessState
from easydist.torch_backend.rendezvous import rendezvous_in

_SECONDS = 60.0
"""Seconds within which ready ranks must meet."""


class OwnRank:
    """This process as a rank.

    Args:
        rank: Its number.
        size: The number of ranks.
        folder: The cluster's folder.
        namespace: The names of the cells.

    Attributes:
        namespace: The names of the cells.
    """

    def __init__(self, rank: int, size: int, folder: str, namespace: dict[str, Any]) -> None:
        self._rank, self._size, self._folder, self.namespace = rank, size, folder, namespace
        self._local_rank, self._local_size = _local()

    @property
    def first_names(self) -> dict[str, Any]:
        """The names that cells find from the start."""
        modules = {"torch": torch, "easydist": sys.modules["easydist"]}
        return {"rank": self._rank, "world_size": self._size, **modules}

    def join(
        self,
        epoch: int,
        address: tuple[str, int] | None = None,
        variables: Mapping[str, str] | None = None,
        owns_gpus: bool = False,
    ) -> None:
        """Create the default process group, or make the existing groups usable again. All ranks call it together.

        A failed cell may have left ranks in different calls. The groups remain the same objects, so that their users,
        such as DDP, continue to work.

        Args:
            epoch: The number of this meeting.
            address: Host and port of the store in which they meet; None: they are on one machine.
            variables: The launcher's variables for this rank from now on.
            owns_gpus: True if the GPUs that this process sees are not for other ranks.
        """
        file = os.path.join(self._folder, f"store-{epoch}")
        store = FileStore(file, self._size) if address is None else reached(*address, _SECONDS)
        if variables:
            os.environ.update(variables)
            self._local_rank, self._local_size = _local()
            ProcessState._reset_state()
        is_renewed = isinstance(dist.group.WORLD, SharedMemoryGroup) and self._is_on_one_host()
        own: dict[str, Any] = {group.group_name: group for group in torch_groups.known()} if is_renewed else {}
        ranks = {name: dist.get_process_group_ranks(group) for name, group in own.items()}
        told, have_gpus = zip(*self._exchange(ranks, self._finds_gpu(owns_gpus), store), strict=True)
        if is_renewed:
            self._renew(own, told, store)
        else:
            if dist.is_initialized():  # gloo and nccl end with their group
                dist.destroy_process_group()
            self._create(store, all(have_gpus), 0 if owns_gpus else self._local_rank)
        self._agree_on_new_groups(store, epoch)

    def _agree_on_new_groups(self, store: Store, epoch: int) -> None:
        """Give groups created from now on equal names and one store on all ranks, including new ranks."""
        torch_groups.set_count(1 + 1000 * epoch)
        torch_groups.set_default_store(PrefixStore(_NEW_GROUPS, store))

    def _is_on_one_host(self) -> bool:
        return self._local_size == self._size

    def _finds_gpu(self, owns_gpus: bool) -> bool:
        """True if there is a GPU for this rank alone."""
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return seen >= (1 if owns_gpus else self._local_size)

    def _create(self, store: Store, has_gpu: bool, device: int) -> None:
        if has_gpu:
            torch.cuda.set_device(device)
        own, place = PrefixStore(_TORCH, store), dict[str, Any](rank=self._rank, world_size=self._size)
        if self._is_on_one_host() and not has_gpu:
            with rendezvous_in(PrefixStore(_DEFAULT, store)):
                dist.init_process_group(NAME, store=own, **place)
        else:
            backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
            connect(lambda: dist.init_process_group(backend, store=own, **place), _SECONDS)

    def _exchange(
        self, ranks: dict[str, list[int]], has_gpu: bool, store: Store
    ) -> list[tuple[dict[str, list[int]], bool]]:
        """Return the ranks of all groups by name, as each rank knows them, and whether it has a GPU of its own."""
        place, limit = PrefixStore("groups", store), timedelta(seconds=_SECONDS)
        with Rendezvous(place, self._rank, self._size, limit, name="the notebook's ranks") as rendezvous:
            told = rendezvous.exchange(json.dumps([ranks, has_gpu]).encode())
        form = {str: [int]}, bool
        return [tuple(decoded(f"the groups of rank {rank}", text, form)) for rank, text in enumerate(told)]

    def _renew(self, own: dict[str, Any], told: Sequence[dict[str, list[int]]], store: Store) -> None:
        """Renew the default group, and those others that all their ranks know."""
        default: Any = dist.group.WORLD
        del own[default.group_name]
        forget(default)
        default.renew(PrefixStore(_DEFAULT, store))
        for name, group in own.items():
            forget(group)
            if not isinstance(group, SharedMemoryGroup):
                continue
            ranks = told[self._rank][name]
            if all(told[rank].get(name) == ranks for rank in ranks):
                group.renew(PrefixStore(f"group/{name}", store))
            else:  # one of its ranks is new
                group.discard()

    def act(self, meta: dict[str, Any], buffers: Sequence[Any], publish: Callable[[Any], None]) -> Any:
        """Perform an action for the notebook.

        Args:
            meta: ``action`` and its arguments.
            buffers: The bytes of the request.
            publish: Sends bytes back.
        """
        return getattr(self, f"_{meta['action']}")(meta, buffers, publish)

    def _push(self, meta: dict[str, Any], buffers: Sequence[Any], publish: Callable[[Any], None]) -> None:
        for name, message in zip(meta["names"], buffers, strict=True):
            self.namespace[name] = unpack(message, weights_only=False)

    def _pull(self, meta: dict[str, Any], buffers: Sequence[Any], publish: Callable[[Any], None]) -> None:
        for name in meta["names"]:
            if name not in self.namespace:
                raise NameError(f"name {name!r} is not defined")
            if meta["weights_only"] and not is_plain(self.namespace[name]):
                raise UnsafeObjectError(_NOT_PLAIN.format(name=name, kind=a_or_an(type(self.namespace[name]).__name__)))
            publish(pack(self.namespace[name], name, to_notebook=True))

    def _call(self, meta: dict[str, Any], buffers: Sequence[Any], publish: Callable[[Any], None]) -> None:
        fn, args, kwargs = unpack(buffers[0], weights_only=False)
        for name, text in meta["sources"].items():
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        if is_program := meta["launch"] is not None:
            _forget_accelerate()
        with _patched(meta["launch"] or {}):
            value = fn(*args, **kwargs)
        result = f"the result of {getattr(fn, '__name__', fn)}"
        publish(pack(None if is_program else value, result, to_notebook=True))

    def _join(self, meta: dict[str, Any], buffers: Sequence[Any], publish: Callable[[Any], None]) -> None:
        self.join(**meta["meeting"])


_DEFAULT, _TORCH, _NEW_GROUPS = "group/default", "torch", "new"
"""The store prefixes for the meeting of the ranks, for torch, and for groups created later."""

_NOT_PLAIN = (
    "{name} is {kind}, which only pickle can send: pull its plain data, such as a state_dict, or call "
    "cluster.pull({name!r}, weights_only=False) if you trust the ranks"
)


def _local() -> tuple[int, int]:
    """Return the rank on this host, and the number of ranks here, as the launcher's variables tell them now."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


@contextlib.contextmanager
def _patched(environment: dict[str, str]) -> Iterator[None]:
    """Set these variables during the block."""
    before = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update(before)


def _forget_accelerate() -> None:
    """Let accelerate, if it is loaded, read its environment again, as in a process of its own."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
