"""`python -m jax_cp_dispatch bench`: measures this machine against its limits and alternatives."""
