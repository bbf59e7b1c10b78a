"""The gang of ranks under Ray: started together, stepped together, and rebuilt when one is lost.

A step's plans and rows go in, and the rows of all ranks come out, or a `RankFailed`. `ranks` owns the members, `steps` runs
steps on them, `supervisor` replaces lost ones, `changes` moves experts and resizes. The room may import `rank` and the rooms
below it.
"""

from epserve.process import ray_settings  # noqa: F401  before Ray is imported
