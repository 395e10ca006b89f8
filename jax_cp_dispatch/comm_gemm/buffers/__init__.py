"""Registered buffers of overlapped GEMMs."""
