"""What several all-to-alls send through: symmetric memory, torch.distributed, DeepEP's library."""
