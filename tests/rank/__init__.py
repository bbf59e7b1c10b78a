"""Tests: one rank."""
