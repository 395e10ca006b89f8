"""Moves tokens between ranks: the public calls, their primitives and implementations."""
