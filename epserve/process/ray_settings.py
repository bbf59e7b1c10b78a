"""Environment that Ray reads when it is imported. The rooms that use Ray import this first."""

import os

# Ray prints a page about each process that dies on the service's standard output, also with log_to_driver=False. The
# service's log names the rank and the consequence. Ray reads its documented filter when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")

# Ray's handler of native crashes also takes SIGTERM, and prints a native stack for it. Ray reads this at import too. The ranks
# keep the handler, since `Cluster.connect` removes the variable from the environment before it starts any process.
OWN_SIGNALS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
FOR_US_ALONE = OWN_SIGNALS not in os.environ
if FOR_US_ALONE:
    os.environ[OWN_SIGNALS] = "1"

# Under `uv run` Ray would upload the folder with pyproject.toml and start the ranks in a copy of it. Relative paths of the
# configuration would then lead nowhere, and Ray refuses a folder above 512 MB. Ranks run in their node's environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
