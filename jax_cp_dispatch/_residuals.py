"""Names of what derivatives keep, for policies of `jax.checkpoint`: see docs/trainers.md.

A policy can keep a value only under its name, so a forward rule names what its backward rule reads
and what is expensive to compute again. Outside `jax.checkpoint`, a name has no effect.
"""

from functools import partial

from jax.ad_checkpoint import checkpoint_name

PAIRS = "cpd.pairs"

# To keep these values saves attention or exchanges
named_context = partial(checkpoint_name, name="context")
# Queries, keys and values that came from other ranks
checkpoint_name_kv = partial(checkpoint_name, name="context_received")
# The rows of all ranks, which the gradient of a weight reads
named_gathered_tokens = partial(checkpoint_name, name="gathered_tokens")
# What a recurrence computes between pairs of rows; its own policy keeps it
named_pairs = partial(checkpoint_name, name=PAIRS)
