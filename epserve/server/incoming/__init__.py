"""Receives requests: limits each message's time, counts incomplete messages, and finds the owners of sockets."""
