"""Tensors, objects and tensor dicts from one rank of a coordinator to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from easydist.agreement.runner import meet
from easydist.base.arguments import integer, integers
from easydist.base.eager import eager
from easydist.errors import DisagreementError, EasydistError
from easydist.messages.frames import OBJECT, TENSOR, TENSOR_DICT, Message
from easydist.messages.pair import Buffers, receive, send
from easydist.messages.transfers import Transfer
from easydist.parallel import all_gather_hop
from easydist.parallel.all_gather_hop import IncomingShares, Terms
from easydist.parallel.members import Members
from easydist.typing import Tree
from easydist.verbs.object_pair import decoded, encoded
from easydist.verbs.ranks import check_rank
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing

Received = tuple[Tree, list[Transfer], list[Callable[[], object]]]


class PointToPoint(Members):
    """The methods between two ranks. ``dst=None`` is the next rank of the group, ``src=None`` the previous one.

    In a group of one rank, trees go nowhere, as in vLLM: ``send_tensor_dict`` returns its argument,
    ``isend_tensor_dict`` no handles, ``recv_tensor_dict`` None, and ``irecv_tensor_dict`` None, no handles and no
    functions. So a stage needs no case for a pipeline of one. The other methods raise: there is no other rank.
    """

    @eager
    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to one rank, and return when it has arrived.

        Law: ``recv(tensor.shape, tensor.dtype, src)`` on rank ``dst`` is ``tensor``.

        Args:
            tensor: A tensor of any dtype and strides.
            dst: Another rank, inside the group; None means the next one.

        Raises:
            DisagreementError: The receiver expects something else. It raises the same.
            ValueError: ``dst`` is not another rank of the group.

        Cost: one message there and one back. 256 KiB and more, or data that is not on the CPU, needs one more there.
        """

        def prepare() -> tuple[torch.Tensor, Buffers]:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"send: got {type(tensor).__name__}, not a tensor; use send_object")
            return Outgoing(tensor.detach()).message(self.communicators)

        send(self.communicators, "send", TENSOR, self._peer_of("send", dst, 1), prepare)

    @eager
    def recv(self, size: torch.Size | int, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive the tensor that one rank sends with ``send``.

        Args:
            size: The shape, or the number of elements. A tensor of another shape with as many elements is received as a
                view.
            dtype: The dtype.
            src: Another rank, inside the group; None means the previous one.

        Returns:
            A new tensor, on ``device``.

        Raises:
            DisagreementError: The sent tensor has another dtype or number of elements. The sender raises the same.
        """
        peer = self._peer_of("recv", src, -1)

        def open_(message: Message) -> tuple[Incoming, Buffers]:
            wanted = torch.Size(integers("recv: size", [size] if isinstance(size, int) else size, "a shape"))
            incoming = Incoming.announced(self.communicators, message.body)
            came = incoming.tree
            if came.dtype is not dtype or came.numel() != wanted.numel():
                raise DisagreementError(
                    f"recv: rank {peer} sends {came.dtype} {tuple(came.shape)}, "
                    f"but rank {self.rank_in_group} expects {dtype} {tuple(wanted)}"
                )
            return incoming, incoming.buffers()

        incoming, _ = receive(self.communicators, "recv", TENSOR, peer, open_)
        tensor: torch.Tensor = incoming.finish()
        return tensor.to(self.device).view(size)

    @eager
    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one rank, and return when it has arrived.

        Args:
            obj: Any object that ``weights_only`` of the constructor permits.
            dst: Another rank, inside the group.

        Raises:
            RemoteError: ``obj`` cannot travel, or the receiver refuses it. The receiver raises the same.
        """
        send(self.communicators, "send_object", OBJECT, dst, encoded(obj, self.weights_only))

    @eager
    def isend_object(self, obj: Any, dst: int) -> Transfer:
        """Send an object as ``send_object`` does, without waiting.

        Returns:
            A handle, as in ``isend_tensor_dict``. The object may be changed at once.
        """
        return send(self.communicators, "isend_object", OBJECT, dst, encoded(obj, self.weights_only), waits=False)

    @eager
    def recv_object(self, src: int) -> Any:
        """Receive the object that one rank sends with ``send_object``."""
        obj, _ = receive(self.communicators, "recv_object", OBJECT, src, decoded(self.weights_only))
        return obj

    @eager
    def send_tensor_dict(
        self,
        tensor_dict: Tree,
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Tree | None:
        """Send a tree of tensors and other values to one rank, and return when it has received the tree.

        Law: ``recv_tensor_dict(src)`` on rank ``dst`` is ``tensor_dict``.

        Tensors of any dtype and strides arrive contiguous, on the receiver's device of their type. The structure
        travels as JSON. Dataclasses, namedtuples, enums and other objects arrive as what they are once their classes
        are allowed (``easydist.allow_globals``).

        Args:
            tensor_dict: Any such tree, not just a dict.
            dst: Another rank, inside the group; None means the next one.
            all_gather_group: The coordinator of the ranks that all send this tree, such as the tensor-parallel group.
                Each of them then sends its share of a tensor, and the receivers gather the shares. By default this
                happens only if ``dst`` is on another host and the group is on one, since it costs more than it saves
                inside a host.
            all_gather_tensors: By key (or path, ``"['a']['b']"``): True sends a tensor in shares on one host, too;
                False never does. Use False for tensors that differ between the ranks of the group.

        Returns:
            None; in a group of one rank, which sends nothing, ``tensor_dict``.

        Raises:
            RemoteError: Something in the tree cannot travel, or the receiver refuses it. The receiver raises the same.
            DisagreementError: The receiver expects another all-gather. It raises the same.
            ValueError: ``dst`` is not another rank of the group.

        Cost: one message there and one back. A tree of more than 31 KiB, or with data that is not on the CPU, needs one
        more for each tensor of 256 KiB or more and one for all others.
        """
        if self._is_without_peers("send_tensor_dict", "dst", dst):
            return tensor_dict
        self._send_tree("send_tensor_dict", tensor_dict, dst, all_gather_group, all_gather_tensors, waits=True)
        return None

    @eager
    def isend_tensor_dict(
        self,
        tensor_dict: Tree,
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Transfer]:
        """Send a tree as ``send_tensor_dict`` does, without waiting.

        Returns:
            Two handles, each for the whole tree; none in a group of one rank, which sends nothing. ``wait()`` returns
            when the receiver has received the tree, and raises what ``send_tensor_dict`` would; a second ``wait()``
            does the same at once. Handles may be dropped. Do not change tensors of 256 KiB and more before they have
            arrived.
        """
        name = "isend_tensor_dict"
        if self._is_without_peers(name, "dst", dst):
            return []
        # vLLM's first handle is the structure's: its workers wait for handles[1:] before they overwrite the tensors.
        return [self._send_tree(name, tensor_dict, dst, all_gather_group, all_gather_tensors, waits=False)] * 2

    @eager
    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Tree:
        """Receive the tree that one rank sends with ``send_tensor_dict`` or ``isend_tensor_dict``.

        Args:
            src: Another rank, inside the group; None means the previous one.
            all_gather_group: The sender's argument. All ranks of the group receive.
            all_gather_tensors: The sender's argument.

        Returns:
            The tree; None in a group of one rank, to which nobody sends.

        Raises:
            RemoteError: The sender's tree cannot travel. The sender raises the same, and so do the ranks that would
                gather shares with this one.
            DisagreementError: As in ``send_tensor_dict``, or the sender has called ``send`` or ``send_object``.
            ValueError: ``src`` is not another rank of the group.
        """
        name = "recv_tensor_dict"
        if self._is_without_peers(name, "src", src):
            return None
        incoming, _ = self._receive_tree(name, src, all_gather_group, all_gather_tensors, waits=True)
        tree = incoming.finish()
        incoming.gather(all_gather_group)
        return tree

    @eager
    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Received:
        """Receive a tree as ``recv_tensor_dict`` does; wait for the structure, not for the data.

        A tree with NumPy scalars is complete on return, because they are copies of its data.

        Returns:
            The tree, handles to wait for, and functions to call afterwards, in order. After these the tree's tensors
            have their values. In a group of one rank: None, no handles and no functions.
        """
        name = "irecv_tensor_dict"
        if self._is_without_peers(name, "src", src):
            return None, [], []
        incoming, transfer = self._receive_tree(name, src, all_gather_group, all_gather_tensors, waits=False)
        if incoming.has_scalars:
            transfer.wait()
        if transfer.is_empty:
            tree, handles, after = incoming.finish(), list[Transfer](), list[Callable[[], object]]()
        else:
            tree, handles, after = incoming.tree, [transfer], [incoming.finish]
        if incoming.has_shares:
            after.append(lambda: incoming.gather(all_gather_group))
        return tree, handles, after

    def _is_without_peers(self, operation: str, name: str, rank: int | None) -> bool:
        """True if the group has no other rank, after checking the argument that names one."""
        if self.world_size > 1:
            return False
        check_rank(self.communicators, operation, name, rank)
        return True

    def _send_tree(
        self,
        operation: str,
        data: Tree,
        dst: int | None,
        group: Any,
        asked: Mapping[str, bool] | None,
        *,
        waits: bool,
    ) -> Transfer:
        (terms, fault), peer = _terms(group, asked), self._peer_of(operation, dst, 1)

        def prepare() -> tuple[torch.Tensor, Buffers]:
            if fault is not None:
                raise fault
            by_default = terms.size > 1 and all_gather_hop.saves_bytes(
                self.hosts[self.rank_in_group], self.hosts[peer], group.hosts
            )
            mine, shapes = all_gather_hop.cut(data, terms, 0 if group is None else group.rank_in_group, by_default)
            metadata = {all_gather_hop.METADATA: json.dumps(shapes)} if shapes else None
            return Outgoing(mine, True, self.weights_only, metadata).message(self.communicators)

        told = {"gather": terms} if terms.size > 1 else {}
        return send(self.communicators, operation, TENSOR_DICT, peer, prepare, told, waits=waits)

    def _receive_tree(
        self, operation: str, src: int | None, group: Any, asked: Mapping[str, bool] | None, *, waits: bool
    ) -> tuple[IncomingShares, Transfer]:
        (terms, fault), comms, peer = _terms(group, asked), self.communicators, self._peer_of(operation, src, -1)

        def open_(message: Message) -> tuple[IncomingShares, Buffers]:
            if fault is not None:
                raise fault
            terms.check(message.terms.get("gather"), peer, comms.rank)
            incoming = IncomingShares.announced(comms, message.body, weights_only=self.weights_only)
            return incoming, incoming.buffers()

        here, there = self.hosts[self.rank_in_group], self.hosts[peer % self.world_size]
        may_share = terms.size > 1 and (here != there or any(terms.asked.values()))
        with _telling(group if may_share else None):
            return receive(comms, operation, TENSOR_DICT, peer, open_, waits=waits)

    def _peer_of(self, operation: str, rank: int | None, step: int) -> int:
        if rank is None:
            return (self.rank_in_group + step) % self.world_size
        return integer(f"{operation}: {'dst' if step > 0 else 'src'}", rank, "a rank")


def _terms(group: Any, asked: Any) -> tuple[Terms, TypeError | None]:
    """Return the terms of a call, or the error that the other rank has to hear, too."""
    try:
        return Terms.of(group, asked), None
    except TypeError as error:
        return Terms(1, {}), error


@contextmanager
def _telling(group: Any) -> Iterator[None]:
    """Make the ranks that would gather shares with this one raise, too, if the block raises."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with suppress(EasydistError):
                meet(group.communicators, "recv_tensor_dict", error)
        raise
