"""Merge coefficients per model and layer, computed from text."""
