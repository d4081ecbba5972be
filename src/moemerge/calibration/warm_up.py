"""A solve of no other use than what it leaves behind: kernels compiled, libraries loaded."""

from __future__ import annotations

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.lockstep.warm_up import RandomRouter, router_like
from moemerge.routing import SolveSettings


def solve_once(
    model: OpenModel, settings: SolveSettings, device: torch.device, dtype: torch.dtype
) -> None:
    """Solve for a random router of the model's shape."""
    router = router_like(model, device, dtype)
    if router is not None:
        problem = problem_of(router, dtype)
        calibrate_layer(problem, settings, start=problem.merged)


def problem_of(router: RandomRouter, dtype: torch.dtype) -> LayerProblem:
    selection = None
    if router.gate.selection_bias is not None:
        selection = router.merged.new_zeros(router.merged.shape[0])
    return LayerProblem(
        gate=router.gate,
        merged=router.merged,
        domains=router.domains,
        holdout=[],
        dtypes=(dtype, dtype if router.has_bias else None),
        selection_bias=selection,
        source_biases={domain.name: selection for domain in router.domains},
    )
