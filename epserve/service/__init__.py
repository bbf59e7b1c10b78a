"""The processes of a service: from a configuration to an engine and a server, until a signal.

A checked configuration goes in, and an exit status comes out. `run` is the process with the ranks, `front_end` one that
joins it, `front_ends` starts and watches those of this host. It may import all rooms but `cli`.
"""
