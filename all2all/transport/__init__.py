"""Transports that several all-to-alls share: symmetric memory, torch.distributed, DeepEP's library."""
