"""Ray: the gang of rank actors, their supervision and recovery, the step scheduler. Everything here runs in asyncio."""
