"""Routing mathematics: gates, the curvature of their divergence, its solution, and figures."""

from moemerge.routing.curvature import DomainCurvature, RouterCurvature
from moemerge.routing.exact import ExactResult, ExactSettings, minimise_divergence
from moemerge.routing.figures import Measured
from moemerge.routing.gates import Curvature
from moemerge.routing.measure import RouterProblem, measure_routers
from moemerge.routing.preconditioners import Preconditioner
from moemerge.routing.products import DomainFeatures
from moemerge.routing.solve import RouterSolution, SolveSettings, solve_router

__all__ = [
    "Curvature",
    "DomainCurvature",
    "DomainFeatures",
    "ExactResult",
    "ExactSettings",
    "Measured",
    "Preconditioner",
    "RouterCurvature",
    "RouterProblem",
    "RouterSolution",
    "SolveSettings",
    "measure_routers",
    "minimise_divergence",
    "solve_router",
]
