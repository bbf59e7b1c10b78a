"""Defines the protocol between client and server: messages, frames, tensors as bytes, and statuses.

Values go in and bytes come out, or the reverse. It does no I/O and imports `process` alone. The client uses it without torch.
"""
