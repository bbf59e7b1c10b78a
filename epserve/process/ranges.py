"""Whole numbers as people write them."""

from collections.abc import Iterable


def shown(numbers: Iterable[int]) -> str:
    """3, 4, 5, 9 -> "3-5, 9", in ascending order; "none" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"
