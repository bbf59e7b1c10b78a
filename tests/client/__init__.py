"""Tests: clients and their engines."""
