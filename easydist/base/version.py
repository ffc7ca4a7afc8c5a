"""The version: setup.cfg takes it from here, so that it does not depend on the name of the installed distribution."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0.dev0"
