"""The paper's experiments in miniature: run, compared over seeds, and written down."""

from moemerge.testbed.experiments.bench import Scale
from moemerge.testbed.experiments.run import TableRequest, TablesResult, run_tables

__all__ = ["Scale", "TableRequest", "TablesResult", "run_tables"]
