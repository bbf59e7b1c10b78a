"""Tests: experts."""
