"""Static sizes of a plan made on the host: those configured, or what a batch needs, rounded up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.metadata.describe import known


class DoesNotFitError(ValueError):
    """A batch does not fit its configured sizes or limits; another one may."""


def needed_sizes(op: str, names: Sequence[str], needs: Any) -> dict[str, Any]:
    """Returns the sizes that suffice for rows of needs of a plan; at least 1, as configs require.

    Raises:
      TypeError: the needs are traced.
    """
    largest = known(op, needs).reshape(-1, len(names)).max(0)
    return dict(zip(names, np.maximum(largest, 1).tolist(), strict=True))


def static_size(
    op: str, config: Any, name: str, what: str, needs: Int[np.ndarray, " W"], step: int
) -> int:
    """Returns the size in the config if sufficient; else the need, rounded up to share programs.

    Args:
      op: the public function, for error messages.
      config, name: the config, and the field with the size; None: by default.
      what: what a rank would do, with `{}` for its need.
      needs: of each rank.
      step: smallest step of rounding; larger needs are rounded up by at most 1/8.
    Raises:
      DoesNotFitError: the given size is too small.
    """
    need, rank = int(needs.max()), int(needs.argmax())
    given = getattr(config, name)
    if need > np.iinfo(np.int32).max:
        raise ValueError(
            f"{op}: rank {rank} {what.format(need)}, but row numbers have 32 bits. Plan for more "
            "ranks, or fewer tokens at a time."
        )
    if given is None:
        step = max(step, 1 << max(need.bit_length() - 4, 0))
        return max(-(-need // step), 1) * step
    if given < need:
        raise DoesNotFitError(
            f"{op}: rank {rank} {what.format(need)} but {name} is {given}. Pass {name}>={need} or "
            f"None in {type(config).__name__}."
        )
    return given
