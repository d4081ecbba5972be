"""Merging models out of core: plan everything, then stream it."""

from moemerge.merging import methods as methods  # registers the methods
from moemerge.merging.method import METHODS, merge_method
from moemerge.merging.run import check_merge, run_merge

__all__ = ["METHODS", "check_merge", "merge_method", "run_merge"]
