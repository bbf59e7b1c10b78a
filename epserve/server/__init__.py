"""Is the gRPC door: it passes requests of clients to an engine, and its results back.

Bytes of a message go in. They are checked, turned into a batch of tensors, handed to the engine, and answered as bytes or as
one typed status. It may import `joining`, `engine`, what they import, and `protocol`. It knows the engine by its methods only,
so that a front end without ranks serves in the same way.
"""
