"""`python -m jax_cp_dispatch doctor`: what this machine offers, and whether it works."""
