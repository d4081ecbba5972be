"""The Python interface: check everything first, then do it. A part is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moemerge.api.answers import evaluate as evaluate
    from moemerge.api.answers import make_data as make_data
    from moemerge.api.answers import tune as tune
    from moemerge.api.coefficients import find_coefficients as find_coefficients
    from moemerge.api.jobs import calibrate as calibrate
    from moemerge.api.jobs import collect_statistics as collect_statistics
    from moemerge.api.jobs import diagnose as diagnose
    from moemerge.api.jobs import extract as extract
    from moemerge.api.jobs import refit as refit
    from moemerge.api.jobs import swap_routers as swap_routers
    from moemerge.api.listing import config_schema as config_schema
    from moemerge.api.listing import inspect as inspect
    from moemerge.api.listing import list_architectures as list_architectures
    from moemerge.api.listing import list_methods as list_methods
    from moemerge.api.listing import list_wrappers as list_wrappers
    from moemerge.api.listing import load_plugin as load_plugin
    from moemerge.api.merging import load_config as load_config
    from moemerge.api.merging import merge as merge
    from moemerge.api.merging import run as run
    from moemerge.api.merging import validate as validate

_PARTS = {
    "answers": "evaluate make_data tune",
    "coefficients": "find_coefficients",
    "jobs": "calibrate collect_statistics diagnose extract refit swap_routers",
    "listing": "config_schema inspect list_architectures list_methods list_wrappers load_plugin",
    "merging": "load_config merge run validate",
}


def __getattr__(name: str) -> Any:
    for part, names in _PARTS.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
