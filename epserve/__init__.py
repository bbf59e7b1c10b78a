"""epserve: experts as a service. Importing this package is light: no torch, no Ray, no gRPC."""

__version__ = "0.1.0"
