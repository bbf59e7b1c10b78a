"""How a rank gets experts from other ranks, or from copies in memory, instead of files."""
