"""Calibration text: prompts answered by a model, judged and filtered; or prompts, or plain text."""
