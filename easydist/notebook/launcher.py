"""Starting ranks: ``start``, and accelerate's ``notebook_launcher``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from easydist.notebook.cluster import Cluster
from easydist.notebook.current import replace, running


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
        >>> import easydist.notebook
        >>> with easydist.notebook.start(1) as cluster:
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


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call ``function(*args)`` on ranks, with accelerate's arguments; on the ranks of the notebook if they run.

    Nothing is forked, so it does not matter what the notebook has done before. The ranks stay, with what the
    function has left in them.

    Args:
        function: What every rank calls; it travels by cloudpickle, with the globals that it uses.
        args: For it.
        num_processes: How many ranks; None: those that run, else as ``start`` does. If another number runs, they are
            stopped.
        mixed_precision: For accelerate, as ``ACCELERATE_MIXED_PRECISION``.
        use_port: Not used: the ranks meet without a port. So are the arguments below that are not mentioned.
        master_addr: Not used.
        node_rank: Not used.
        num_nodes: 1; ranks of a notebook are on one machine.
        rdzv_backend: Not used.
        rdzv_endpoint: Not used.
        rdzv_conf: Not used.
        rdzv_id: Not used.
        max_restarts: 0; a function is not called again after it has failed.
        monitor_interval: Not used.
        log_line_prefix_template: Not used.

    Raises:
        ValueError: Several nodes or restarts are asked for.
        TypeError: The function cannot be pickled.
        CellError: It raised on a rank.

    Source: accelerate's ``notebook_launcher``.
    """
    if num_nodes != 1:
        raise ValueError(f"notebook_launcher: ranks of a notebook are on one machine, got num_nodes={num_nodes}")
    if max_restarts:
        raise ValueError(f"notebook_launcher: a function is not called again, got max_restarts={max_restarts}")
    cluster = running()
    if cluster is None or num_processes not in (None, cluster.size):
        cluster = start(num_processes)
    cluster.launch(function, tuple(args), {"ACCELERATE_MIXED_PRECISION": str(mixed_precision).lower()})


def _default_size() -> int:
    import torch

    return torch.cuda.device_count() or 2
