"""Front ends in other processes and on other hosts, which share one queue.

Batches that a front end has checked go in, and they reach the queue of the process with the ranks. Claims on clients' limits and
the board of shared regions take the same way. The room may import `engine` and the rooms below it.
"""
