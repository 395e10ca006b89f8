"""Ulysses attention: ranks exchange tokens of all heads for all tokens of a share of the heads."""
