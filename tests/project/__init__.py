"""Tests: docs, packages and benchmarks."""
