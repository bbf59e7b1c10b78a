"""Tests: what only GPUs can show."""
