"""easydist on Ray: groups of actors, and ranks. Needs the extra ``ray``, which is imported when one of them is made."""

from easydist.cluster.ranks import Ranks
from easydist.weights.ray import (
    create_group,
    destroy_group,
    group,
    init_group,
    ray_broadcast_object,
    ray_broadcast_tensor_dict,
)

__all__ = [
    "Ranks",
    "create_group",
    "destroy_group",
    "group",
    "init_group",
    "ray_broadcast_object",
    "ray_broadcast_tensor_dict",
]
