"""Supervised fine-tuning: a model learns the answers of rows, by trl, and keeps its layout."""
