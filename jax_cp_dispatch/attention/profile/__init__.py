"""Common parts of the profiles: a stopwatch for each rank, and the record of steps."""
