"""Merging models out of core: plan everything, then stream it."""

from moemerge.merging import methods as methods  # registers the methods
from moemerge.merging.method import METHODS, load_plugins, merge_method
from moemerge.merging.run import MergeJob, plan_merge, run_merge

__all__ = ["METHODS", "MergeJob", "load_plugins", "merge_method", "plan_merge", "run_merge"]
