"""How the kernels of an exchange move rows on GPUs."""

import os

_MOVERS = ("registers", "bulk")


def chosen_mover(op: str) -> str:
    """Returns `JAX_CP_DISPATCH_MOVER`, which is read when a program is lowered.

    "registers" is the default. "bulk" uses the copy engines of the multiprocessors, on GPUs of
    compute capability 9.0 and newer; others use registers. Ranks may use different ones.
    """
    mover = os.environ.get("JAX_CP_DISPATCH_MOVER", _MOVERS[0])
    if mover not in _MOVERS:
        raise ValueError(
            f"{op}: JAX_CP_DISPATCH_MOVER is {mover!r}; it must be 'registers' or 'bulk'. Unset it "
            "for the default."
        )
    return mover
