"""How requests come in: each message within its time, counted while it is not whole, and whose sockets they use."""
