"""The Python interface. Functions check everything first; a module is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moemerge.api.experts import compose as compose
    from moemerge.api.experts import prune as prune
    from moemerge.api.jobs import collect_statistics as collect_statistics
    from moemerge.api.jobs import convert as convert
    from moemerge.api.jobs import diagnose as diagnose
    from moemerge.api.jobs import evaluate as evaluate
    from moemerge.api.jobs import extract as extract
    from moemerge.api.jobs import extract_lora as extract_lora
    from moemerge.api.jobs import make_data as make_data
    from moemerge.api.jobs import swap_routers as swap_routers
    from moemerge.api.jobs import tune as tune
    from moemerge.api.listing import config_schema as config_schema
    from moemerge.api.listing import inspect as inspect
    from moemerge.api.listing import list_architectures as list_architectures
    from moemerge.api.listing import list_methods as list_methods
    from moemerge.api.listing import list_wrappers as list_wrappers
    from moemerge.api.listing import load_plugin as load_plugin
    from moemerge.api.listing import sample as sample
    from moemerge.api.listing import verify as verify
    from moemerge.api.merging import find_coefficients as find_coefficients
    from moemerge.api.merging import load_config as load_config
    from moemerge.api.merging import merge as merge
    from moemerge.api.merging import run as run
    from moemerge.api.merging import validate as validate
    from moemerge.api.repairs import calibrate as calibrate
    from moemerge.api.repairs import distill as distill
    from moemerge.api.repairs import refit as refit

_PARTS = {
    "experts": "compose prune",
    "jobs": (
        "collect_statistics convert diagnose evaluate extract extract_lora make_data swap_routers "
        "tune"
    ),
    "listing": (
        "config_schema inspect list_architectures list_methods list_wrappers load_plugin sample "
        "verify"
    ),
    "merging": "find_coefficients load_config merge run validate",
    "repairs": "calibrate distill refit",
}


def __getattr__(name: str) -> Any:
    for part, names in _PARTS.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
