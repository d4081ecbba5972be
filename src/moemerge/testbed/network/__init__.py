"""Small OLMoE and Qwen3-MoE models as batched tensors: their layout, forward pass and writing."""
