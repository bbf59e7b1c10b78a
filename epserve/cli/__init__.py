"""Holds the command line: one file a command, each a few lines over a room below.

Arguments go in, text and an exit status come out. It may import every room. `entry` begins, `commands` has the table of all
commands, and `layer/` is the synthetic layer that `epserve profile` and the benchmarks run.
"""
