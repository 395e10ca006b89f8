"""8-bit operands and their scales."""
