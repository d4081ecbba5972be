"""Repair merged models layer by layer."""
