"""PARSER: compression of Mixture-of-Experts models (arXiv 2609.00575)."""
