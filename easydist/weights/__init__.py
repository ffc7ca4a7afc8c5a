"""Transfer of a model's weights, from the ranks that have them to those that need them."""

from easydist.weights.broadcast import broadcast_state_dict
from easydist.weights.checkpoint import broadcast_checkpoint
from easydist.weights.publisher import WeightPublisher
from easydist.weights.resharding import Resharding
from easydist.weights.shards import LocalShard
from easydist.weights.versions import WeightReceiver

__all__ = [
    "LocalShard",
    "Resharding",
    "WeightPublisher",
    "WeightReceiver",
    "broadcast_checkpoint",
    "broadcast_state_dict",
]
