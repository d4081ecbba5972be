"""Prune experts: score them on text, and write the model without the lowest scores."""
