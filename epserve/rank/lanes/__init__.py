"""Lanes that a rank serves itself: in host memory, while it is the only rank, and on its GPU, with the thread that serves those
and the graphs that it launches. It may import what `rank` imports.
"""
