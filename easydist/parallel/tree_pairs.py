"""Tensor dicts from one rank of a coordinator to another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from easydist.agreement.runner import meet
from easydist.eager import eager
from easydist.errors import EasydistError
from easydist.parallel import all_gather_hop
from easydist.parallel.all_gather_hop import IncomingShares, Terms
from easydist.parallel.frames import TENSOR_DICT, Message
from easydist.parallel.pairs import Pairs
from easydist.parallel.transfers import Transfer
from easydist.typing import Tree
from easydist.verbs.tensor_dict_messages import Outgoing

Received = tuple[Tree, list[Transfer], list[Callable[[], None]]]


class TreePairs(Pairs):
    """The methods between two ranks that take trees."""

    @eager
    def send_tensor_dict(
        self,
        tensor_dict: Tree,
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> None:
        """Give one rank a tree of tensors and other values; returns when the receiver has taken it.

        Law: ``recv_tensor_dict(src)`` on rank ``dst`` is ``tensor_dict``.

        Tensors of any dtype and strides arrive contiguous, on the receiver's device of their type; the structure
        travels as JSON. Dataclasses, namedtuples, enums and other objects arrive as what they are, once their classes
        are allowed (``easydist.allow_globals``).

        Args:
            tensor_dict: Any such tree, not just a dict.
            dst: Another rank, inside the group; None is the next one.
            all_gather_group: The coordinator of the ranks that all send this tree, such as the tensor-parallel group.
                Each then sends its share of a tensor, and the receivers gather the shares; done where ``dst`` is on
                another host and the group is on one, as inside a host it costs more than it saves.
            all_gather_tensors: By key (or path, ``"['a']['b']"``): True has a tensor sent in shares on one host too,
                False never. Say False for tensors that the ranks of the group do not have alike.

        Raises:
            RemoteError: Something in the tree cannot travel, or the receiver cannot take it. It raises the same.
            DisagreementError: The receiver means another all-gather. It raises the same.
            ValueError: ``dst`` is not another rank of the group.

        Cost: one message there and one back; for more than 31 KiB, or what is not on the CPU, one more for each tensor
        of 256 KiB or more and one for all others.
        """
        self._send_tree("send_tensor_dict", tensor_dict, dst, all_gather_group, all_gather_tensors, waits=True)

    @eager
    def isend_tensor_dict(
        self,
        tensor_dict: Tree,
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Transfer]:
        """As ``send_tensor_dict``, without waiting.

        Returns:
            One handle. ``wait()`` returns when the receiver has taken the tree, and raises what ``send_tensor_dict``
            would; a second ``wait()`` does the same at once. A handle may be dropped. Tensors of 256 KiB and more must
            not be changed before they have arrived.
        """
        name = "isend_tensor_dict"
        return [self._send_tree(name, tensor_dict, dst, all_gather_group, all_gather_tensors, waits=False)]

    @eager
    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Tree:
        """Take the tree that one rank gives with ``send_tensor_dict`` or ``isend_tensor_dict``.

        Args:
            src: Another rank, inside the group; None is the previous one.
            all_gather_group: As the sender says; all its ranks receive.
            all_gather_tensors: As the sender says.

        Returns:
            The tree.

        Raises:
            RemoteError: The sender's tree cannot travel. The sender raises the same.
                So do the ranks that would gather shares with this one.
            DisagreementError: As in ``send_tensor_dict``; and the sender has called ``send`` or ``send_object``.
            ValueError: ``src`` is not another rank of the group.
        """
        name = "recv_tensor_dict"
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
        """As ``recv_tensor_dict``; waits for the structure, not for the data.

        Returns:
            The tree, handles to wait for, functions to call afterwards, in order. Then the tree's tensors hold their
            values.
        """
        name = "irecv_tensor_dict"
        incoming, transfer = self._receive_tree(name, src, all_gather_group, all_gather_tensors, waits=False)
        tree = incoming.finish() if transfer.is_empty else incoming.tree
        after: list[Callable[[], None]] = [] if transfer.is_empty else [lambda: _update(tree, incoming.finish())]
        if incoming.has_shares:
            after.append(lambda: incoming.gather(all_gather_group))
        return tree, [] if transfer.is_empty else [transfer], after

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
        terms, peer = Terms.of(group, asked), self._peer_of(dst, 1)

        def prepare() -> Outgoing:
            by_default = terms.size > 1 and all_gather_hop.saves_bytes(
                self.hosts[self.rank_in_group], self.hosts[peer], group.hosts
            )
            mine, shapes = all_gather_hop.cut(data, terms, 0 if group is None else group.rank_in_group, by_default)
            metadata = {all_gather_hop.METADATA: json.dumps(shapes)} if shapes else None
            return Outgoing(mine, True, self.weights_only, metadata)

        told = {"gather": terms} if terms.size > 1 else {}
        return self._post(operation, TENSOR_DICT, dst, prepare, told, waits=waits)

    def _receive_tree(
        self, operation: str, src: int | None, group: Any, asked: Mapping[str, bool] | None, *, waits: bool
    ) -> tuple[IncomingShares, Transfer]:
        terms, comms, peer = Terms.of(group, asked), self.communicators, self._peer_of(src, -1)

        def open_(message: Message) -> IncomingShares:
            terms.check(message.terms.get("gather"), peer, comms.rank)
            return IncomingShares.announced(comms, message.body, weights_only=self.weights_only)

        here, there = self.hosts[self.rank_in_group], self.hosts[peer % self.world_size]
        may_share = terms.size > 1 and (here != there or any(terms.asked.values()))
        with _telling(group if may_share else None):
            return self._receive(operation, TENSOR_DICT, src, open_, waits=waits)


@contextmanager
def _telling(group: Any) -> Iterator[None]:
    """Let the ranks that would gather shares with this one raise, too, where nothing has come."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with suppress(EasydistError):
                meet(group.communicators, "recv_tensor_dict", error)
        raise


def _update(tree: Tree, whole: Tree) -> None:
    """Give a dict the NumPy scalars that are known only now."""
    if whole is not tree and isinstance(tree, dict):
        tree.update(whole)
