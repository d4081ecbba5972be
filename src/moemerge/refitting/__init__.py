"""Refit every linear map of a merged model in closed form, layer by layer."""

from moemerge.refitting.prepare import RefitRequest
from moemerge.refitting.report import RefitReport
from moemerge.refitting.run import run_refit

__all__ = ["RefitReport", "RefitRequest", "run_refit"]
