"""vLLM as a client: against stand-ins of its contracts, and for real where its wheel is installed."""
