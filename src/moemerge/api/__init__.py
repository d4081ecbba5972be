"""The Python interface: check everything first, then do it."""

from moemerge.api.data import make_data
from moemerge.api.jobs import calibrate, collect_statistics, diagnose, swap_routers
from moemerge.api.merging import (
    inspect,
    list_architectures,
    list_methods,
    load_config,
    merge,
    run,
    validate,
)

__all__ = [
    "calibrate",
    "collect_statistics",
    "diagnose",
    "inspect",
    "list_architectures",
    "list_methods",
    "load_config",
    "make_data",
    "merge",
    "run",
    "swap_routers",
    "validate",
]
