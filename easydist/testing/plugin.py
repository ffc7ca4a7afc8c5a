"""The pytest plugin: ``pytest_plugins = ["easydist.testing.plugin"]`` in ``conftest.py``.

It provides the fixture ``ranks``, and ends the pool with the session.
"""

from __future__ import annotations

import pytest

from easydist.testing.pool import Pool, close_default_pool, default_pool


@pytest.fixture(scope="session")
def ranks() -> Pool:
    """Return the session's pool: ``ranks.run(fn, world_size, *args)`` calls ``fn`` on every rank."""
    return default_pool()


def pytest_sessionfinish() -> None:
    """End the workers."""
    close_default_pool()
