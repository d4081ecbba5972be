"""Merge coefficients per model and layer, computed from text."""

from moemerge.coefficients.job import CoefficientsRequest
from moemerge.coefficients.run import CoefficientsReport, run_coefficients

__all__ = ["CoefficientsReport", "CoefficientsRequest", "run_coefficients"]
