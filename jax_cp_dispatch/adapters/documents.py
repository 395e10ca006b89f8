"""The documents of a batch, which adapters take where a library passes a dense mask."""

from __future__ import annotations

from typing import Any

from jax_cp_dispatch.documents import Documents


def document_keywords(op: str, mask: Any) -> dict[str, Any]:
    """Returns keywords of `context_parallel_attention`, from a layer's `mask`."""
    if mask is None:
        return {}
    if not isinstance(mask, Documents):
        raise TypeError(
            f"{op}: mask is of type {type(mask).__name__}, but no [T, T] mask is ever read. Pass "
            "mask=Documents(segment_ids), or omit it; its own mask= takes an object of "
            "jax_cp_dispatch.masks."
        )
    return {"documents": mask}


def refuse(op: str, reason: str, **given: Any) -> None:
    """Raises if one of the arguments is given."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{op}: got {name}, but {reason}. Omit it.")


def refuse_dropout(op: str, rate: float, is_off: bool | None, switch: str) -> None:
    """Raises if attention weights are to be dropped."""
    if rate > 0 and not is_off:
        raise NotImplementedError(
            f"{op}: got a dropout rate of {rate}, but attention weights are never stored, so none "
            f"can be dropped. Set the rate to 0, or pass {switch}=True."
        )
