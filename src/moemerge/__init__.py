"""Merge Mixture-of-Experts language models and repair the routers that merging breaks."""
