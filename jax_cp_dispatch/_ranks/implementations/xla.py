"""By XLA's collectives: on every platform, and for whatever no transport serves."""

from typing import Any

from jax_cp_dispatch._ranks.implementations.implementation import Implementation


def _no_attributes(*_: Any) -> dict[str, Any]:
    return {}  # without a custom call


XLA = Implementation(
    name="xla",
    platform=None,
    spans_processes=True,
    is_collectives=True,
    why_not=lambda platforms, groups: None,
    serves=lambda: (
        "XLA's collectives, on every platform; a rank may hold all ranks' rows, and a plan that "
        "does not fit gives NaN, not an error"
    ),
    remedy="",
    rank_attributes=_no_attributes,
)
