"""Coefficients for a merge, found from text: how much of each model, layer by layer."""
