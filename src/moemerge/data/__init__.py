"""Calibration text: prompts answered by a model, judged and filtered; or prompts, or plain text."""

from moemerge.data.job import DataRequest
from moemerge.data.report import DataReport
from moemerge.data.run import run_data

__all__ = ["DataReport", "DataRequest", "run_data"]
