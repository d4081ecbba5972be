"""Activation and gradient statistics of one model, gathered over text."""

from moemerge.collecting.prepare import CollectRequest
from moemerge.collecting.report import CollectReport
from moemerge.collecting.run import run_collect

__all__ = ["CollectReport", "CollectRequest", "run_collect"]
