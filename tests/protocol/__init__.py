"""Tests: messages and frames."""
