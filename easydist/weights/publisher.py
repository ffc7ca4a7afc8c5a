"""The publisher of versioned weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.typing import Group, Timeout
from easydist.weights.exchange import BUCKET_NBYTES, Sending
from easydist.weights.holders import Publish
from easydist.weights.members import Member
from easydist.weights.source import Filter, Rename
from easydist.weights.target import Wanted

__all__ = ["WeightPublisher"]


class WeightPublisher(Member):
    """Publishes versions of a model's weights to the receivers of a group.

    Each member of the group is a ``WeightPublisher`` or a ``WeightReceiver``. Several publishers are the ranks of one
    sharded model; of a replicated one, as with DDP, the publisher ``src`` alone sends. While ``publish`` runs, every
    receiver calls ``receive``.

    Args:
        model_or_dict: A module, or a state dict that is changed in place; it may hold ``DTensor`` and ``LocalShard``.
        src: The publisher's rank in the group; for a sharded model all ranks. With a group of torch, it must be the
            same rank of the world.
        group: The members.
        group_src: The same as ``src``, for any group.
        dtype: As in ``broadcast_state_dict``.
        filter: As in ``broadcast_state_dict``.
        rename: As in ``broadcast_state_dict``.
        verify: As in ``broadcast_state_dict``.
        bucket_bytes: As in ``broadcast_state_dict``.

    Attributes:
        version: The last version that all members have; 0 if there is none yet.

    Example:
        >>> import torch
        >>> from easydist import weights
        >>> publisher = weights.WeightPublisher(torch.nn.Linear(2, 1))
        >>> publisher.publish(), publisher.publish(10), publisher.publish(changed=["bias"])
        (1, 10, 11)
    """

    @hiding(src=0)
    def __init__(
        self,
        model_or_dict: Any,
        *,
        src: int | Sequence[int] = UNSET,
        group: Group = None,
        group_src: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        filter: Filter = None,
        rename: Rename = None,
        verify: bool = False,
        bucket_bytes: int = BUCKET_NBYTES,
    ) -> None:
        super().__init__(group, src, group_src)
        self._model_or_dict = model_or_dict
        self.wanted = Wanted(filter, rename)
        self.sending = Sending(dtype, bucket_bytes, verify)

    def weights(self) -> Any:
        """Return the weights to publish."""
        return self._model_or_dict

    def publish(
        self,
        version: int | None = None,
        *,
        changed: Iterable[str] | None = None,
        timeout: Timeout | None = None,
    ) -> int:
        """Send the current weights to all receivers.

        Law: either it returns, and every receiver has the version; or it raises, and none does.

        Args:
            version: A number larger than the previous one; None means the previous one plus one.
            changed: The names, in this model, of the entries that differ from the version before, with all that are
                tied to them. Only these travel, and entries that are not tensors; receivers keep the others. A
                receiver that lacks the version before gets all entries. That the others have not changed is not
                checked. None means all.
            timeout: The time limit of the call; None is the group's.

        Returns:
            The version.

        Raises:
            RemoteError: The version is not newer than a member's, or the weights cannot be sent or received, or
                ``changed`` names an entry that is not published. Or a receiver has left the loop over ``stream``.
            DisagreementError: A receiver's model has other names, shapes or dtypes.
            PeerLostError: A member was lost. The others keep their version, and continue with ``regroup``.
            CollectiveTimeout: A member did not come. The others keep their version, and continue with ``regroup``.

        Cost: that of ``broadcast_state_dict``, and one header exchange. The bytes are those of the changed entries.
        """
        return int(run(Publish(self, self.src, version, changed=changed), self.comms, timeout))
