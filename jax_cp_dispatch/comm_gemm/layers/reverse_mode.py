"""The error of `jax.jvp` for GEMMs that support reverse mode only."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def reverse_mode_only(op: str) -> Iterator[None]:
    """Names the operation in the error, which JAX's own message does not."""
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        raise TypeError(
            f"{op}: got forward mode (jax.jvp, jax.jacfwd, jax.hessian), but it has a derivative "
            "in reverse mode only, of any order. Use jax.vjp, jax.grad or jax.jacrev: a Hessian "
            "is jax.jacrev(jax.grad(...))."
        ) from None
