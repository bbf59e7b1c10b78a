"""Runs a kernel's step as a CUDA graph, or as two halves that overlap."""
