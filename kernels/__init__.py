"""Kernels: each a triple of kernel, plain reference and test."""
