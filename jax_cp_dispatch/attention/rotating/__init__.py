"""Attention while keys rotate: ring, zigzag and Hamilton."""
