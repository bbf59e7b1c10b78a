"""The Open Inference Protocol (KServe v2): a second face of the same calls."""
