"""Tests: front ends that join."""
