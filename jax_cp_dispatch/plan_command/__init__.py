"""`python -m jax_cp_dispatch plan`: compares algorithms for the documents of a batch."""
