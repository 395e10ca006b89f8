"""The demonstration: plans and computes attention of real documents on virtual devices."""
