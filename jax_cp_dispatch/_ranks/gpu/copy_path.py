"""How the kernels of an exchange copy rows on GPUs."""

import os

_COPY_PATHS = ("registers", "bulk")


def chosen_copy_path(op: str) -> str:
    """Returns `JAX_CP_DISPATCH_COPY_PATH`, which is read when a program is lowered.

    "registers" is the default. "bulk" uses the copy engines of the multiprocessors, on GPUs of
    compute capability 9.0 and newer; others use registers. Ranks may use different ones.
    """
    path = os.environ.get("JAX_CP_DISPATCH_COPY_PATH", _COPY_PATHS[0])
    if path not in _COPY_PATHS:
        raise ValueError(
            f"{op}: JAX_CP_DISPATCH_COPY_PATH is {path!r}; it must be 'registers' or 'bulk'. Unset "
            "it for the default."
        )
    return path
