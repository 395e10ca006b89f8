"""Matmuls over all ranks: derivatives, global arrays, other axes."""
