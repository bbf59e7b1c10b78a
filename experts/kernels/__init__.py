"""Device code only: `@triton.jit` functions. Their launchers are `experts/triton/`."""
