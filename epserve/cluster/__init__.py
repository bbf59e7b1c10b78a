"""Brings up Ray clusters and runs the service on them, over ssh: `epserve cluster up | status | logs | down FILE`.

`file` reads a Ray cluster file. `ssh` reaches its nodes. `node` runs on a node. `launch` has the four commands.
Importing this package is light: nodes import `node` before anything else is set up.
"""
