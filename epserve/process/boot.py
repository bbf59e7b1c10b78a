"""Which host this is, for processes that compare: standard library only."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the running kernel: equal in all processes of one host, in whatever container, and another after each boot.

    Raises OSError where the system has none (not Linux).
    """
    return BOOT_ID.read_text(encoding="utf-8").strip()
