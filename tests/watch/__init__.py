"""Tests: what one sees of a server."""
