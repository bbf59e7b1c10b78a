"""Knows how checkpoints store the matrices of experts, quantised or not: layouts as data, and reads by them."""
