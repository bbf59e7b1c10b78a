"""Pure functions that decide, before any weight is read, the kernels and experts of every rank."""
