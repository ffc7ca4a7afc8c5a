"""The structure of one rank's tree, made known to ranks that have none of their own."""

from __future__ import annotations

import torch

from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.data.leaves import Leaves
from easydist.data.structure import get_data_structure, initialize_tensors
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.typing import Tree


def announced(call: Call, data: Tree) -> Call:
    """The source's call, with the structure of its tree as what it sends; what is no leaf is pickled."""
    encoded = codec.encode(get_data_structure(data))
    call.nbytes, call.payload = encoded.numel(), [encoded]
    return call


def shared_leaves(
    comms: Communicators, operation: str, data: Tree, source: int, agreed: Agreement, hollow: bool = False
) -> Leaves:
    """Leaves like the source's on every rank, and on the source its own.

    Args:
        comms: The group.
        operation: The verb's name.
        data: The source's tree; not looked at elsewhere.
        source: Its rank.
        agreed: The agreement for which the source has ``announced`` its structure.
        hollow: Make tensors on the meta device, which have no memory.

    Cost: one header exchange, and a broadcast of the structure where it was too large for the one before.
    """
    leaves: list[Leaves] = []
    encoded = _encoded(comms, source, agreed)

    def decode() -> Call:
        mine = comms.rank == source
        leaves.append(Leaves(data if mine else initialize_tensors(codec.decode(encoded), hollow=hollow)))
        return Call()

    agree(comms, operation, decode)  # a class that one receiver does not have must not stop the others
    return leaves[0]


def _encoded(comms: Communicators, source: int, agreed: Agreement) -> torch.Tensor:
    if agreed.has_payload:
        return agreed.payload(source).clone()
    mine = comms.rank == source
    nbytes = agreed.nbytes[source]
    encoded = agreed.call.payload[0] if mine else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    comms.control.broadcast(encoded, source, async_op=False)
    return encoded
