"""Tests: the gRPC door."""
