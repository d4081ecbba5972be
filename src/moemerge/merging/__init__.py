"""Merge models out of core: plan every tensor, then stream the plan."""

from moemerge import methods as methods  # registers the methods
from moemerge.merging.run import MergeJob, plan_merge, run_merge, write_placeholder
from moemerge.methods.method import METHODS, load_plugins, merge_method
from moemerge.methods.wrappers import WRAPPERS, merge_wrapper

__all__ = [
    "METHODS",
    "WRAPPERS",
    "MergeJob",
    "load_plugins",
    "merge_method",
    "merge_wrapper",
    "plan_merge",
    "run_merge",
    "write_placeholder",
]
