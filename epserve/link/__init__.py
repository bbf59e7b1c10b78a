"""How the engine and the ranks talk: one greeting, one kind of frame, and memory that both map.

A header and tensors go in at one end and come out at the other, in order. It may import `process`, `config` and `errors`.
"""
