"""Chooses the method of a GEMM, by cost or measurement."""
