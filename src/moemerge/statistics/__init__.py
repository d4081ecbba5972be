"""Saved statistics of a model: the file, its provenance, and whether it fits."""
