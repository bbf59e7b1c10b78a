"""What one sees of a running server: metrics, traces, the status page and the minutes behind it."""
