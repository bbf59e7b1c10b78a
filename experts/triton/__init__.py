"""Triton experts, gate and dense layers: checks, buffers and launches. Device code is in `experts/kernels/`."""
