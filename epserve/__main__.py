"""`python -m epserve`."""

from epserve.cli import main

main()
