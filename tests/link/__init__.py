"""Tests: between engine and ranks."""
