"""The engine: requests of many clients become steps of all ranks.

A `Batch` goes in and an `Answer` comes out, in one order of steps for all ranks. Pure functions choose the requests of a step and
the rows of each rank (`planning`, `shares`). Servers and joined front ends use the `EngineFace` alone. The room may import `pool`
and the rooms below it.
"""
