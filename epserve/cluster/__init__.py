"""Bring up Ray clusters and run the service on them, over ssh: `epserve cluster up | status | logs | down FILE`.

`file` reads a Ray cluster file; `ssh` reaches its nodes; `node` is what runs on a node; `launch` is the four commands.
Importing this package is light: nodes import `node` before anything else is set up.
"""
