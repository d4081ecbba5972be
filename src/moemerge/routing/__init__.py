"""Routing mathematics: gates, the curvature of their divergence, its solution, and figures."""

from moemerge.routing.cg import Status
from moemerge.routing.exact import ExactResult, minimise_divergence
from moemerge.routing.figures import Measured
from moemerge.routing.gates import Curvature
from moemerge.routing.measure import RouterProblem, measure_routers
from moemerge.routing.products import DomainFeatures
from moemerge.routing.solve import RouterSolution, solve, solve_bytes

__all__ = [
    "Curvature",
    "DomainFeatures",
    "ExactResult",
    "Measured",
    "RouterProblem",
    "RouterSolution",
    "Status",
    "measure_routers",
    "minimise_divergence",
    "solve",
    "solve_bytes",
]
