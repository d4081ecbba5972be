"""Merging models out of core: plan everything, then stream it."""

from moemerge.merging import methods as methods  # registers the methods
from moemerge.merging.method import METHODS, merge_method
from moemerge.merging.plugins import load_plugins
from moemerge.merging.run import check_merge, run_merge

__all__ = ["METHODS", "check_merge", "load_plugins", "merge_method", "run_merge"]
