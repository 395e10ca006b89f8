"""Attention to keys on this rank, whose passes all algorithms share."""
