"""Errors that GPUs found in exchanges, brought to the host."""

from jax_cp_dispatch._ranks import runtime


def raise_gpu_errors() -> None:
    """Raises what GPUs have found wrong in exchanges and no call has raised yet.

    A GPU finds out that a plan does not fit, or that a rank did not come, when the host has long
    gone on. The results are then NaN (-1 in integers), and the next call over the same ranks raises
    the error; so does this function, once `jax.block_until_ready` has returned. With
    `JAX_CP_DISPATCH_CHECK=1` in the environment every call waits and raises its own errors.

    Raises:
      RuntimeError: the errors, one per line.
    """
    errors = runtime.cuda.take_errors() if runtime.cuda is not None else []
    if errors:
        raise RuntimeError("\n".join(errors))
