"""Backward steps of a rank: gradients of rows and of routing weights. It may import what `rank` imports."""
