"""Merge Mixture-of-Experts language models and repair what merging breaks.

Importing this package is instant and changes nothing; torch is imported when a name needs it.
"""

from __future__ import annotations

# Not even `typing` is imported: until the command line has begun, Ctrl-C would show a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from moemerge.api import calibrate as calibrate
    from moemerge.api import collect_statistics as collect_statistics
    from moemerge.api import compose as compose
    from moemerge.api import convert as convert
    from moemerge.api import diagnose as diagnose
    from moemerge.api import distill as distill
    from moemerge.api import extract as extract
    from moemerge.api import extract_lora as extract_lora
    from moemerge.api import find_coefficients as find_coefficients
    from moemerge.api import inspect as inspect
    from moemerge.api import load_config as load_config
    from moemerge.api import merge as merge
    from moemerge.api import prune as prune
    from moemerge.api import refit as refit
    from moemerge.api import run as run
    from moemerge.api import swap_routers as swap_routers
    from moemerge.api import validate as validate
    from moemerge.api import verify as verify
    from moemerge.checkpoint import Checkpoint as Checkpoint
    from moemerge.config.job_settings import CoefficientSettings as CoefficientSettings
    from moemerge.config.job_settings import CollectingSettings as CollectingSettings
    from moemerge.config.job_settings import ComposeSettings as ComposeSettings
    from moemerge.config.job_settings import DiagnosisSettings as DiagnosisSettings
    from moemerge.config.job_settings import ExtractLoraSettings as ExtractLoraSettings
    from moemerge.config.repair_settings import CalibrationSettings as CalibrationSettings
    from moemerge.config.repair_settings import DistillSettings as DistillSettings
    from moemerge.config.repair_settings import PruneSettings as PruneSettings
    from moemerge.config.repair_settings import RefitSettings as RefitSettings
    from moemerge.config.settings import MergeSettings as MergeSettings
    from moemerge.config.text_settings import DataSettings as DataSettings
    from moemerge.errors import ArchitectureError as ArchitectureError
    from moemerge.errors import CheckpointError as CheckpointError
    from moemerge.errors import ConfigError as ConfigError
    from moemerge.errors import DataError as DataError
    from moemerge.errors import MoeMergeError as MoeMergeError
    from moemerge.errors import NumericalError as NumericalError
    from moemerge.errors import ResourceError as ResourceError
    from moemerge.errors import TokenizerError as TokenizerError
    from moemerge.errors import UsageError as UsageError
    from moemerge.lab.api import evaluate as evaluate
    from moemerge.lab.api import make_data as make_data
    from moemerge.lab.api import tune as tune
    from moemerge.lab.settings import EvaluationSettings as EvaluationSettings
    from moemerge.lab.study.run import study as study
    from moemerge.lab.study.settings import StudySettings as StudySettings
    from moemerge.lab.tuning.settings import TuningSettings as TuningSettings
    from moemerge.methods.method import merge_method as merge_method
    from moemerge.methods.wrappers import merge_wrapper as merge_wrapper
    from moemerge.version import __version__ as __version__


# The public names of each module.
_PUBLIC = {
    "moemerge.api": (
        "calibrate collect_statistics compose convert diagnose distill extract extract_lora "
        "find_coefficients inspect load_config merge prune refit run swap_routers validate verify"
    ),
    "moemerge.lab.api": "evaluate make_data tune",
    "moemerge.checkpoint": "Checkpoint",
    "moemerge.config.job_settings": (
        "CoefficientSettings CollectingSettings ComposeSettings DiagnosisSettings "
        "ExtractLoraSettings"
    ),
    "moemerge.config.repair_settings": (
        "CalibrationSettings DistillSettings PruneSettings RefitSettings"
    ),
    "moemerge.config.settings": "MergeSettings",
    "moemerge.config.text_settings": "DataSettings",
    "moemerge.errors": (
        "ArchitectureError CheckpointError ConfigError DataError MoeMergeError NumericalError "
        "ResourceError TokenizerError UsageError"
    ),
    "moemerge.lab.settings": "EvaluationSettings",
    "moemerge.lab.study.settings": "StudySettings",
    "moemerge.lab.study.run": "study",
    "moemerge.lab.tuning.settings": "TuningSettings",
    "moemerge.methods.method": "merge_method",
    "moemerge.methods.wrappers": "merge_wrapper",
    "moemerge.version": "__version__",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'moemerge' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
