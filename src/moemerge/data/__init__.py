"""Make calibration text: prompts answered by a model and filtered, prompts alone, or plain text."""

from moemerge.data.job import DataRequest
from moemerge.data.run import DataReport, run_data

__all__ = ["DataReport", "DataRequest", "run_data"]
