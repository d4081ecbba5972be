"""Evaluate, generate text, tune and study models: uses the core, which never imports it."""
