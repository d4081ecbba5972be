"""The functions that run repairs, by verb. Importing one imports torch and transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from moemerge.config.repairs import Repair

RUNNERS = {
    "calibrate": "harc:calibrate",
    "distill": "distill:distill",
    "prune": "prune:prune",
    "refit": "refit:refit",
}


def load_runner(repair: Repair) -> Callable[[Any, Any], Any]:
    """Return the function that takes a request and a progress bar, and returns a report."""
    module, _, function = RUNNERS[repair.verb].partition(":")
    found: Any = getattr(importlib.import_module(f"moemerge.repairs.{module}"), function)
    run: Callable[[Any, Any], Any] = getattr(found, "run", found)
    return run
