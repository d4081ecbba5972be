"""Activation and gradient statistics of one model, gathered over text."""
