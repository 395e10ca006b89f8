"""Reports on the host the errors that GPUs found in exchanges."""

from jax_cp_dispatch._ranks import runtime


def raise_gpu_errors() -> None:
    """Raises the errors that GPUs found in exchanges and that no call has raised yet.

    A GPU detects an invalid plan or a missing rank after the host has continued. The results are
    then NaN (-1 for integers), and the next call over the same ranks raises the error. Call this
    function after `jax.block_until_ready` to raise it earlier. If the environment variable
    `JAX_CP_DISPATCH_CHECK=1` is set, every call waits and raises its own errors.

    Raises:
      RuntimeError: the errors, one per line.
    """
    errors = runtime.cuda.take_errors() if runtime.cuda is not None else []
    if errors:
        raise RuntimeError("\n".join(errors))
