"""Merge Mixture-of-Experts language models and repair the routers that merging breaks.

Importing this package is instant and changes nothing; torch is imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moemerge.version import __version__

if TYPE_CHECKING:
    from moemerge.api import calibrate as calibrate
    from moemerge.api import collect_statistics as collect_statistics
    from moemerge.api import diagnose as diagnose
    from moemerge.api import inspect as inspect
    from moemerge.api import load_config as load_config
    from moemerge.api import merge as merge
    from moemerge.api import run as run
    from moemerge.api import swap_routers as swap_routers
    from moemerge.api import validate as validate
    from moemerge.checkpoint import Checkpoint as Checkpoint
    from moemerge.merging.method import merge_method as merge_method


# Public name -> the room it lives in.
_PUBLIC = {
    "Checkpoint": "moemerge.checkpoint",
    "calibrate": "moemerge.api",
    "collect_statistics": "moemerge.api",
    "diagnose": "moemerge.api",
    "inspect": "moemerge.api",
    "load_config": "moemerge.api",
    "merge": "moemerge.api",
    "merge_method": "moemerge.merging.method",
    "run": "moemerge.api",
    "swap_routers": "moemerge.api",
    "validate": "moemerge.api",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moemerge' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
