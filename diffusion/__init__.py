"""Diffusion language models with shared-prefix caching (BiCache)."""
