"""The GEMM of one rank, on CPU and GPU, or by XLA."""
