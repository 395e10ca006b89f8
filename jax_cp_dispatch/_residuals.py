"""Names of what derivatives keep, for policies of `jax.checkpoint`: see docs/trainers.md.

A policy can keep a value only under its name, so a forward rule names what its backward rule reads
and what is expensive to compute again. Outside `jax.checkpoint`, a name has no effect.
"""

from typing import TypeVar

from jax.ad_checkpoint import checkpoint_name

PAIRS = "cpd.pairs"

T = TypeVar("T")


def named_context(kept: T) -> T:
    """Names values for checkpoint policies: keeping them saves attention or exchanges."""
    return checkpoint_name(kept, "context")


def checkpoint_name_kv(kept: T) -> T:
    """Names queries, keys and values that came from other ranks."""
    return checkpoint_name(kept, "context_received")


def named_gathered_tokens(kept: T) -> T:
    """Names the rows of all ranks, which the gradient of a weight reads."""
    return checkpoint_name(kept, "gathered_tokens")


def named_pairs(kept: T) -> T:
    """Names what a recurrence computes between pairs of rows; its own policy keeps it."""
    return checkpoint_name(kept, PAIRS)
