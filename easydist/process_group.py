"""A ``torch.distributed`` backend over shared memory, for ranks of one host: ``init_process_group("easydist_shm")``.

Importing this module registers it. ``import easydist`` alone does not: as soon as any backend is registered, torch
leaves the default backend of ``init_process_group("cpu:gloo")`` undefined.
"""

import easydist.torch_backend.registration  # noqa: F401 - registers the backend
from easydist.torch_backend.group import SharedMemoryGroup
from easydist.torch_backend.rendezvous import NAME

__all__ = ["NAME", "SharedMemoryGroup"]
