"""Tests: the gang of ranks."""
