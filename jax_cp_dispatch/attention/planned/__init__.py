"""Attention by a plan: balanced and placed."""
