"""A library that moves nested data between the processes of a PyTorch program: one call, any structure."""

import sys

import lazy_loader

from easydist.base import forks as _forks  # registers a hook that has to see every fork

__version__ = "0.1.0.dev0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return _load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
