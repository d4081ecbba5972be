"""Saved statistics of a model: the file, its provenance, and whether it fits a model."""

from moemerge.statistics.file import Fisher, Gram, Statistics
from moemerge.statistics.provenance import Provenance
from moemerge.statistics.writer import StatisticsWriter

__all__ = ["Fisher", "Gram", "Provenance", "Statistics", "StatisticsWriter"]
