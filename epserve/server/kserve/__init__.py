"""Serves the Open Inference Protocol (KServe v2), a second interface to the same calls."""
