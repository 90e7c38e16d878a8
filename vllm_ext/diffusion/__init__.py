"""Serving of diffusion language models in vLLM: architectures, scheduler, worker."""
