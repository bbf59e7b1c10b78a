"""Ray: the gang of rank actors, their supervision and recovery, the step scheduler. Everything here runs in asyncio."""

import os

# Ray prints its own page about each process that dies on the standard output of whoever started the service, also with
# log_to_driver=False; our log says which rank it was and what follows. Ray reads its documented filter when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")
