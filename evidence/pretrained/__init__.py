"""A mixture of experts that was pre-trained for real, specialists of it, and their accuracy.

`make` turns SmolLM2-135M-Instruct into 32 experts (top 8), continues its training and fine-tunes
specialists; `score` measures models on the test splits of public benchmarks. See README.md.
"""
