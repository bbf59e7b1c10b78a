"""Sizes of tiles for the Triton kernels: tables, what fits on a GPU, candidates and their search. No device is touched."""
