"""Compressed Mixture-of-Experts models against the dense ones and against other ways to compress."""
