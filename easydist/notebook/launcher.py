"""The cluster of this process, which has at most one: ``start``, and accelerate's ``notebook_launcher``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from easydist.base.arguments import integer
from easydist.notebook.cluster import Cluster, demand_extra

if TYPE_CHECKING:
    from easydist.cluster.ranks import Ranks
    from easydist.notebook.rank import Place

_current: list[Cluster] = []


def start(n: int | None = None, *, on: Literal["ray"] | Ranks | None = None, **options: Any) -> Cluster:
    """Start ranks on this machine or on a Ray cluster, and the magics ``%%ranks``, ``%push`` and ``%pull``.

    A process has one cluster, so the previous one is stopped.

    Args:
        n: The number of ranks; None: the number of GPUs of this machine, else 2; or that of the ranks in ``on``.
        on: ``"ray"``: the ranks are on the nodes of a Ray cluster; None: on this machine. Existing ``Ranks``: cells run
            in their processes, whose modules and variables they see, until the cluster is stopped; until then their
            ``run`` and ``restart`` raise an error. Stopping the cluster does not end them.
        **options: Keyword arguments of ``easydist.ray.Ranks``, such as ``resources={"GPU": 1}``, for ranks on Ray.

    Returns:
        The cluster, with which a program runs cells and functions on the ranks.

    Raises:
        ImportError: Packages of the extra ``notebook`` are missing, or Ray is.
        ValueError: ``n`` is less than 1, or not the number of the existing ranks; or ``on`` is no valid place.
        TypeError: Options are given for ranks that exist already, or on this machine; or ``n`` is not an integer.
        PeerLostError: One of the existing ranks is lost.
        CollectiveTimeout: The Ray cluster does not have enough resources.
        RuntimeError: A rank did not start; the text contains its output. Or the existing ranks are busy or closed.

    Example:
        >>> import easydist.notebook
        >>> with easydist.notebook.start(1) as cluster:
        ...     cluster.execute("easydist.gather(torch.ones(1) * rank)")
        rank 0: tensor([0.])
    """
    if n is not None and (n := integer("n", n, "a number of ranks")) < 1:
        raise ValueError(f"a cluster needs at least one rank, got n={n}")
    size, place = _on_this_machine(n, options) if on is None else _on_ray(n, on, options)
    if (before := _running()) is not None:
        print(f"the {before.size} ranks that ran before are stopped")
        before.stop()
    _current[:] = [cluster := Cluster(size, place=place())]
    with contextlib.suppress(ImportError):  # a plain program can work without IPython
        from easydist.notebook.magics import register

        register(_running)
    return cluster


def _on_this_machine(n: int | None, options: dict[str, Any]) -> tuple[int, Callable[[], None]]:
    """Return the number of ranks, and a function that returns None for this machine."""
    if options:
        raise TypeError(f'start: {", ".join(options)} need on="ray"')
    return _default_size() if n is None else n, lambda: None


def _on_ray(n: int | None, on: object, options: dict[str, Any]) -> tuple[int, Callable[[], Place]]:
    """Return the number of ranks, and a function that makes their place, once the ranks before are stopped."""
    demand_extra()
    from easydist.cluster.actors import Actors
    from easydist.cluster.ranks import Ranks
    from easydist.notebook.on_ray import OnRay

    if isinstance(on, Ranks):
        if n not in (None, on.size):
            raise ValueError(f"start: on= has {on.size} ranks, got n={n}")
        if options:
            raise TypeError(f"start: {', '.join(options)} cannot be changed: the ranks of on= exist")
        return on.size, lambda: OnRay(on, is_owner=False)
    if on != "ray":
        raise ValueError(f'start: on={on!r} is no place for ranks: on="ray", existing Ranks, or None for this machine')
    if n is None:
        raise ValueError('start: on="ray" needs the number of ranks')
    Actors(n, **options)  # raises for what no cluster can do
    return n, lambda: OnRay(Ranks(n, **options), is_owner=True)


def _running() -> Cluster | None:
    """Return the cluster started last; None if there is none, or it was stopped."""
    return _current[0] if _current and _current[0].is_running else None


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
    """Call ``function(*args)`` on ranks, with accelerate's arguments. Running ranks of the notebook are reused.

    Nothing is forked, so the notebook may have used CUDA before. The ranks keep running, with all values that the
    function has left in them.

    Args:
        function: The function that every rank calls. It travels by cloudpickle, with the globals that it uses.
        args: Its arguments.
        num_processes: The number of ranks; None: that of the running ranks, else as for ``start``. Running ranks of
            another number are stopped.
        mixed_precision: The value of ``ACCELERATE_MIXED_PRECISION``.
        use_port: Not used: the ranks meet without a port.
        master_addr: Not used.
        node_rank: Not used.
        num_nodes: 1; ``start(n, on="ray")`` starts ranks on several machines, which are reused.
        rdzv_backend: Not used.
        rdzv_endpoint: Not used.
        rdzv_conf: Not used.
        rdzv_id: Not used.
        max_restarts: 0; a failed function is not called again.
        monitor_interval: Not used.
        log_line_prefix_template: Not used.

    Raises:
        ValueError: Several nodes or restarts are requested.
        TypeError: The function cannot be pickled.
        CellError: It raised on a rank.

    Source: accelerate's ``notebook_launcher``.
    """
    if num_nodes != 1:
        raise ValueError(f"notebook_launcher: ranks of a notebook are on one machine, got num_nodes={num_nodes}")
    if max_restarts:
        raise ValueError(f"notebook_launcher: a function is not called again, got max_restarts={max_restarts}")
    cluster = _running()
    if cluster is None or num_processes not in (None, cluster.size):
        cluster = start(num_processes)
    cluster.launch(function, tuple(args), {"ACCELERATE_MIXED_PRECISION": str(mixed_precision).lower()})


def _default_size() -> int:
    import torch

    return torch.cuda.device_count() or 2
