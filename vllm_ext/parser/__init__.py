"""Serving of compressed checkpoints in vLLM: the quantization method `parser`."""
