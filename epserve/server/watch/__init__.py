"""Shows a running server: metrics, traces, the status page and the last minutes behind it."""
