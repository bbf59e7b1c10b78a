"""Tests: commands and processes."""
