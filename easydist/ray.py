"""easydist between Ray actors. It needs the extra ``ray``, which is imported when a group is made."""

from easydist.weights.ray import (
    create_group,
    destroy_group,
    group,
    init_group,
    ray_broadcast_object,
    ray_broadcast_tensor_dict,
)

__all__ = [
    "create_group",
    "destroy_group",
    "group",
    "init_group",
    "ray_broadcast_object",
    "ray_broadcast_tensor_dict",
]
