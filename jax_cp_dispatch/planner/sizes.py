"""Static sizes of a plan made on the host: those configured, or what a batch needs, rounded up."""

import numpy as np


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def static_size(
    op: str, config: str, name: str, what: str, needs: np.ndarray, given: int | None, least: int
) -> int:
    """Returns the given size if sufficient; by default the need, rounded up to share programs.

    Args:
      op, config, name: the public function, the class and its field, for error messages.
      what: what a rank would do, with `{}` for its need.
      needs: of each rank.
      least: smallest step of rounding; larger needs are rounded up by at most 1/8.
    Raises:
      DoesNotFitError: the given size is too small.
    """
    need, rank = int(needs.max()), int(needs.argmax())
    if need > np.iinfo(np.int32).max:
        raise ValueError(
            f"{op}: rank {rank} {what.format(need)}, but rows have 32-bit numbers. Plan for more "
            "ranks, or fewer tokens at a time."
        )
    if given is None:
        step = max(least, 1 << max(need.bit_length() - 4, 0))
        return max(-(-need // step), 1) * step
    if given < need:
        raise DoesNotFitError(
            f"{op}: rank {rank} {what.format(need)} but {name} is {given}. Pass {name}>={need} or "
            f"None in {config}."
        )
    return given
