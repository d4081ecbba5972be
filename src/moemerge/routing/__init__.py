"""Routing mathematics: gates, the curvature of their divergence, its solution, and metrics."""

from moemerge.routing.curvature import Curvature, DomainFeatures, DomainStatistics, RouterCurvature
from moemerge.routing.exact import ExactResult, ExactSettings, minimise_divergence
from moemerge.routing.metrics import (
    MetricsAccumulator,
    RoutingMetrics,
    measure,
    measure_routers,
)
from moemerge.routing.preconditioners import Preconditioner
from moemerge.routing.solve import RouterSolution, SolveSettings, solve_router

__all__ = [
    "Curvature",
    "DomainFeatures",
    "DomainStatistics",
    "ExactResult",
    "ExactSettings",
    "MetricsAccumulator",
    "Preconditioner",
    "RouterCurvature",
    "RouterSolution",
    "RoutingMetrics",
    "SolveSettings",
    "measure",
    "measure_routers",
    "minimise_divergence",
    "solve_router",
]
