"""Fused products for accelerators; every one has a plain-torch twin that is always right."""
