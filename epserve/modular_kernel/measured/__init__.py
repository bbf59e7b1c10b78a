"""Choices that are timed on the device: which backend serves which sizes of batches, and the times kept of it."""
