"""Packed documents: what the tokens of a batch are, and in which order they are on the ranks."""
