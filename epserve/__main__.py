"""`python -m epserve`."""

from epserve.entry import main

if __name__ == "__main__":
    main()
