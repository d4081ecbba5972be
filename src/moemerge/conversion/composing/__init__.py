"""Compose MoE models of dense ones, and add experts to MoE models."""
