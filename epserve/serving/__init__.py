"""The gRPC front end. Nothing is imported here: the client uses `wire`, `status` and the stubs without torch."""
