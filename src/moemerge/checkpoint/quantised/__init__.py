"""Weights in few bits: read as floats, and written back."""
