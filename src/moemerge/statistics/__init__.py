"""Saved statistics of a model: the file, its provenance, and whether it fits a model."""

from moemerge.config.documents import Provenance
from moemerge.statistics.file import Statistics, UnitStatistics
from moemerge.statistics.writer import StatisticsWriter

__all__ = ["Provenance", "Statistics", "StatisticsWriter", "UnitStatistics"]
