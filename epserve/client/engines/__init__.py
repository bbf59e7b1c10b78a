"""Engines whose attention runs here and whose experts run in the service. They may import `models` besides."""
