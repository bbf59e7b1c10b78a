"""The weights that a rank holds, and how it gets experts from other ranks, or from copies in memory, instead of files."""
