"""Supervised fine-tuning with trl: a model learns the answers of rows and keeps its layout."""
