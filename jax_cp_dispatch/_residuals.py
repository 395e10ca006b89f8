"""Names of what derivatives keep, for policies of `jax.checkpoint`: see docs/trainers.md.

A policy can keep a value only under its name, so a forward rule names what its backward rule reads
and what is expensive to compute again. Outside `jax.checkpoint`, a name has no effect.
"""

from functools import partial

from jax.ad_checkpoint import checkpoint_name

PAIRS = "cpd.pairs"

# Keeping these saves attention or exchanges; then queries, keys and values of other ranks; the rows
# of all ranks, which the gradient of a weight reads; and what a recurrence computes between pairs
# of rows, which its own policy keeps.
named_context = partial(checkpoint_name, name="context")
checkpoint_name_kv = partial(checkpoint_name, name="context_received")
named_gathered_tokens = partial(checkpoint_name, name="gathered_tokens")
named_pairs = partial(checkpoint_name, name=PAIRS)
