"""Environment that Ray reads when it is imported. The rooms that use Ray import this first."""

import os

# Ray prints its own page about each process that dies on the standard output of whoever started the service, also with
# log_to_driver=False; our log says which rank it was and what follows. Ray reads its documented filter when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")

# Ray's handler of native crashes also takes SIGTERM, and prints a native stack for it. Read at the same time; the ranks keep
# the handler, since `Cluster.connect` takes this out of the environment before it starts anything.
OWN_SIGNALS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
FOR_US_ALONE = OWN_SIGNALS not in os.environ
if FOR_US_ALONE:
    os.environ[OWN_SIGNALS] = "1"

# Under `uv run` Ray would upload the folder with pyproject.toml and start the ranks in a copy of it: relative paths of the
# configuration then lead nowhere, and a folder above 512 MB is refused. Ranks run in the environment of their node.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
