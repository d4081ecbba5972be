"""Prompts to completions: engines behind one protocol, and the file that completions wait in."""
