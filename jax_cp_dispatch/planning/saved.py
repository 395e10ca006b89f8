"""Saved plans and placements: a pickle names its format, so that another version can refuse it.

The fields are a pickle of their own. So what this version no longer has, in a plan of another one,
is found after its format has been read. The name and the module of `load_saved` are in every saved
plan: they stay.
"""

import dataclasses
import pickle
from typing import Any

# To be counted up with every change of the fields of `Plan` or `Placement`, or of their meaning.
FORMAT = 1


def reduce_saved(self: Any) -> tuple[Any, ...]:
    """`__reduce__` of a dataclass: its class, and its fields without what is cached."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    kind = type(self)
    return load_saved, (FORMAT, kind.__name__, pickle.dumps((kind, fields), protocol=5))


def load_saved(found: int, name: str, payload: bytes) -> Any:
    """Returns the saved object.

    Raises:
      ValueError: another version of the package has saved it.
    """
    advice = "Plan the batch again, with this version of jax_cp_dispatch."
    if found != FORMAT:
        raise ValueError(
            f"{name}: this was saved in format {found} of plans, but this version of "
            f"jax_cp_dispatch reads format {FORMAT}. {advice}"
        )
    try:
        kind, fields = pickle.loads(payload)
        return kind(**fields)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name}: another version of jax_cp_dispatch has saved this: {error}. {advice}"
        ) from error
