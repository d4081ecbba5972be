"""Fused kernels for GPUs; each has a reference in plain torch."""
