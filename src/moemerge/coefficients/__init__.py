"""Coefficients for a merge, found from text: how much of each model, layer by layer."""

from moemerge.coefficients.job import CoefficientsRequest
from moemerge.coefficients.run import CoefficientsReport, run_coefficients

__all__ = ["CoefficientsReport", "CoefficientsRequest", "run_coefficients"]
