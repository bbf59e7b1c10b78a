"""Chooses backends by times that are measured on the device, for each size of batches, and keeps those times."""
