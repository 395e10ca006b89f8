"""Calls with global arrays: the mesh and its axes, padding, and one program on all ranks."""
