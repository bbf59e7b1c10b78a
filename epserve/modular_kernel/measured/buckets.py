"""Lists the sizes of batches that are measured: one table for backends, all-to-alls and tiles."""

BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Numbers of rows. A batch takes the choice of the bucket that is nearest on a logarithmic scale."""


def bucket_of(num_rows: int) -> int:
    """Returns the nearest bucket: 2 -> 1, 3 -> 4, 33 -> 64."""
    return next((bucket for bucket in BUCKETS if num_rows <= 2 * bucket), BUCKETS[-1])
