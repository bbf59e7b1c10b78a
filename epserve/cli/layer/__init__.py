"""One MoE layer of random weights, run and taken apart: for `epserve profile` and the benchmarks."""
