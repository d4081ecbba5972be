"""HARC: solve for the routers of a merged model, layer by layer."""

from moemerge.calibration.job import CalibrationRequest
from moemerge.calibration.report import CalibrationReport
from moemerge.calibration.run import run_calibration

__all__ = ["CalibrationReport", "CalibrationRequest", "run_calibration"]
