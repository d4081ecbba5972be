"""Collect activation and gradient statistics of one model over text."""
