"""Collect activation and gradient statistics of one model over text."""

from moemerge.collecting.job import CollectRequest
from moemerge.collecting.run import CollectReport, run_collect

__all__ = ["CollectReport", "CollectRequest", "run_collect"]
