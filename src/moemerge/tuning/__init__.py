"""Supervised fine-tuning with trl: a model learns the answers of rows and keeps its layout."""

from moemerge.tuning.job import TuningRequest
from moemerge.tuning.output import TuningReport
from moemerge.tuning.run import run_tuning

__all__ = ["TuningReport", "TuningRequest", "run_tuning"]
