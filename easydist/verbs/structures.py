"""Sending the structure of one rank's tree to ranks that have no tree."""

from __future__ import annotations

from easydist.agreement.agree import agree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.data.leaves import Leaves
from easydist.data.structure import get_data_structure, initialize_tensors
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.typing import Tree


def announced(call: Call, data: Tree) -> Call:
    """Return the source's call with the structure of its tree as the payload; plain values are pickled."""
    encoded = codec.encode(get_data_structure(data))
    call.nbytes, call.payload = encoded.numel(), [encoded]
    return call


def shared_leaves(
    comms: Communicators, operation: str, data: Tree, source: int, agreed: Agreement, hollow: bool = False
) -> Leaves:
    """Return leaves like the source's on every rank; on the source, its own.

    Args:
        comms: The group.
        operation: The verb's name.
        data: The source's tree; ignored on other ranks.
        source: The rank of the source.
        agreed: The agreement for which the source has ``announced`` its structure.
        hollow: True to make tensors on the meta device, which have no memory.

    Cost: one header exchange, and a broadcast of the structure if it was too large for the previous one.
    """
    leaves: list[Leaves] = []
    encoded = agreed.payload_of(comms, source).clone()  # the next agreement overwrites it

    def decode() -> Call:
        mine = comms.rank == source
        leaves.append(Leaves(data if mine else initialize_tensors(codec.decode(encoded), tied=True, hollow=hollow)))
        return Call()

    agree(comms, operation, decode)  # if one receiver lacks a class, all ranks have to raise
    return leaves[0]
