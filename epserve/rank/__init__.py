"""One rank: its experts, gates and kernels, and the process around them.

A `StepPlan` and the rank's rows go in, and its rows of the result come out. `worker` is a plain class, `actor` its shell under
Ray, `setup/` decides what every rank will run, `weights/` holds its layers and brings experts from other ranks. It may import
`link` and what lies below.
"""

from epserve.process import ray_settings  # noqa: F401  before Ray is imported
