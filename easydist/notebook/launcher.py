"""Starting ranks: ``start``, and accelerate's ``notebook_launcher``."""

from __future__ import annotations

import contextlib

from easydist.notebook.cluster import Cluster
from easydist.notebook.current import replace


def start(n: int | None = None) -> Cluster:
    """Start ranks on this machine, and the magics ``%%ranks``, ``%push`` and ``%pull``.

    A process has one cluster: the one before is stopped.

    Args:
        n: How many; None: the number of GPUs, else 2.

    Raises:
        ImportError: Packages of the extra ``notebook`` are missing.
        ValueError: ``n`` is less than 1.
        RuntimeError: A rank did not start; its output is in the text.

    Example:
        >>> with start(1) as cluster:
        ...     cluster.execute("easydist.gather(torch.ones(1) * rank)")
        rank 0: tensor([0.])
    """
    size = _default_size() if n is None else n
    if size < 1:
        raise ValueError(f"a cluster needs at least one rank, got n={n}")
    cluster = replace(size)
    with contextlib.suppress(ImportError):  # a plain program may do without IPython
        from easydist.notebook.magics import register

        register()
    return cluster


def _default_size() -> int:
    import torch

    return torch.cuda.device_count() or 2
