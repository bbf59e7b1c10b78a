"""Runs and times one MoE layer of random weights, for `epserve profile` and the benchmarks."""
