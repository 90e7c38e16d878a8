"""Diffusion language models: how fast and how good each way to reuse keys and values is."""
