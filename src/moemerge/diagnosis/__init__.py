"""Diagnose the routing of a merge: figures per layer and domain, a verdict, advice."""

from moemerge.diagnosis.job import DiagnosisRequest
from moemerge.diagnosis.results import Diagnosis
from moemerge.diagnosis.run import run_diagnosis
from moemerge.diagnosis.swap import SwapReport, swap_routers

__all__ = [
    "Diagnosis",
    "DiagnosisRequest",
    "SwapReport",
    "run_diagnosis",
    "swap_routers",
]
