"""Which host this is, for processes that compare: standard library only."""

import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the running kernel: equal in all processes of one host, in whatever container, and another after each boot.

    Raises OSError where the system has none (not Linux).
    """
    return BOOT_ID.read_text(encoding="utf-8").strip()


def host_key() -> str:
    """Returns the kernel's boot and the network namespace: equal for processes that reach each other without a network.

    Abstract Unix sockets connect exactly those. Containers with networks of their own count as hosts of their own.
    """
    return f"{boot_id()}.{os.stat('/proc/self/ns/net').st_ino}"
