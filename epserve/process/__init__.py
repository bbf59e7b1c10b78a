"""What any process of the service needs: logs, signals, memory, traces, facts of its host.

It may import `cluster.node`, `config` and `errors`, and neither torch nor Ray nor gRPC at its top.
"""
