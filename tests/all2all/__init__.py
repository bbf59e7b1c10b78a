"""Tests: all-to-alls."""
