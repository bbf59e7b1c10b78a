"""Tests: the Open Inference Protocol."""
