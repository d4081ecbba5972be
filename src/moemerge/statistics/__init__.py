"""Saved statistics of a model: the file, its provenance, and whether it fits."""

from moemerge.statistics.file import Fisher, Gram, Kind, Statistics
from moemerge.statistics.provenance import Provenance
from moemerge.statistics.writer import StatisticsWriter

__all__ = ["Fisher", "Gram", "Kind", "Provenance", "Statistics", "StatisticsWriter"]
