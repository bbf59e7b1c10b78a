"""The engine: requests of many clients become steps of all ranks.

A `Batch` goes in and its result comes out, in one order of steps for all ranks. Which requests form a step, and which rank
computes which rows, is decided by pure functions (`planning`, `shares`). It may import `pool` and what lies below.
"""
