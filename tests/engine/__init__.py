"""Tests: requests and steps."""
