"""Tests: the modular kernel."""
