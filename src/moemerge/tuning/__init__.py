"""Supervised fine-tuning: a model learns the answers of rows, by trl, and keeps its layout."""

from moemerge.tuning.job import TuningRequest
from moemerge.tuning.report import TuningReport
from moemerge.tuning.run import run_tuning

__all__ = ["TuningReport", "TuningRequest", "run_tuning"]
