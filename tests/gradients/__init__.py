"""Tests of gradients, from a rank's experts to a client's autograd."""
