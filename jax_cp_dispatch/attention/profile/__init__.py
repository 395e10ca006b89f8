"""Profiles: Hamilton attention step by step, and the attention of each rank alone."""
