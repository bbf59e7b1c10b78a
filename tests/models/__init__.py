"""Tests: checkpoints."""
