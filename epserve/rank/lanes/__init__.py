"""Lanes of clients whose rows lie in memory of this rank's GPU: the thread that serves them, and the graphs that it
launches. It may import what `rank` imports.
"""
