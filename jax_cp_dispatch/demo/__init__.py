"""The demonstration: real documents, planned, moved, attended and checked on virtual devices."""
