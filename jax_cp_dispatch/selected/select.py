"""`select_keys`: the keys that an index picks for each query, over a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_cp_dispatch._arguments import HostOrDevice, check_positive
from jax_cp_dispatch._door import door
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.algorithms.exchange_once import Gathered, Movement
from jax_cp_dispatch.attention.operands import LocalWork, Operands, Outputs
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.masks.selected import refuse_picks
from jax_cp_dispatch.selected.call import IndexOptions, read_index, run_index
from jax_cp_dispatch.selected.pick import PickOptions, pick_keys

_OP = "select_keys"


@door(_OP, **STEPS_OF_DOCUMENTS)
def select_keys(
    q_index: Float[HostOrDevice, "B T *G J d"],
    k_index: Float[HostOrDevice, "B T *Gk d"],
    weights: Float[HostOrDevice, "B T *G J"] | None = None,
    *,
    num_keys: int,
    block: int = 1,
    pool: str = "max",
    local: bool | None = None,
    relu: bool = True,
    head_axis: str | Names[str] | None = None,
    **options: Unpack[IndexOptions],
) -> Int32[Array, "B T *G k"]:
    """Returns the keys that a learned index picks for each query, for `masks.Selected`.

        score(t, s) = sum_j weights[t, j] * relu(q_index[t, j] . k_index[s])

    Of the keys that the mask shows, a query picks the `num_keys` with the highest scores; fewer if
    fewer are visible. Among equal scores the lowest positions are picked; NaN is below all others,
    also as the score of a block with a key of NaN. Scores are computed in float32, or float64; the
    arrays are projected, rotated and normed by the caller. Picks are the same bits on any number of
    ranks, and in packed, zigzag and placed order. Memory grows with the tokens.

    Call where `context_parallel_attention` may be called. The index keys move as its keys would, in
    an exchange of their own; with "balanced" also q_index and weights, and the picks back. Without
    derivative: `index_loss` trains the index.

    Args:
      q_index: `[B, T, J, d]`, queries of J heads; or of G groups, `[B, T, G, J, d]`, each of which
        picks for itself.
      k_index: `[B, T, d]`, one key for all heads; or one for each group, `[B, T, G, d]`.
      weights: of the heads, `[B, T, J]` or `[B, T, G, J]`; None: 1 each.
      num_keys: the most picks of a query.
      block: tokens of a pick: the blocks of each document, counted from its start, of whose visible
        keys' scores the largest or the mean counts.
      pool: "max" or "mean".
      local: whether the block that holds the query is picked in any case. None: if `block` > 1.
      relu: whether products are cut at 0.
      axis_name, mesh, batch_axis, implementation, deadline, num_comm_sm: as in
        `context_parallel_attention`.
      algorithm: "placed", "balanced", "halo" or "auto".
      mask: a mask of numbers that sees one range of keys; None is causal, or the plan's.
      documents, segment_ids, positions: as in `context_parallel_attention`.
      head_axis: of global arrays: mesh axis over which the groups are sharded, or several. Without
        groups it has no effect: its devices repeat the work.
    Returns:
      Positions in the query's document, divided by `block`: int32 `[B, T, num_keys]`, or `[B, T, G,
      num_keys]`; ascending, and -1 after the last. Sharded as q_index. All -1 for padding.
    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError: as `context_parallel_attention`.
    References:
      DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; MiniMax-M3 and Qwen3.8 for blocks and groups.
    """
    has_groups = q_index.ndim == 5
    q, k, w = read_index(_OP, q_index, k_index, weights, relu)
    check_positive(_OP, num_keys=num_keys, block=block)
    refuse_picks(_OP, options.get("mask"))
    if pool not in ("max", "mean"):
        raise ValueError(f"{_OP}: pool is {pool!r}; it needs to be 'max' or 'mean'. Pass one.")
    if not isinstance(local, bool | None):
        raise TypeError(f"{_OP}: local is {local!r}; it needs to be a bool. Pass True or False.")
    local = block > 1 if local is None else local
    q, k, w = jax.tree.map(jax.lax.stop_gradient, (q, k, w))
    task = _Select(PickOptions(int(num_keys), int(block), pool, local, relu))
    heads = head_axis if has_groups else ()
    picks = run_index(task, Operands((q, w), (k,), None), options, head_axis=heads)
    return picks if has_groups else picks[:, :, 0]


@dataclasses.dataclass(frozen=True)
class _Select(LocalWork):
    """What a rank computes; see `Call.local`."""

    op: ClassVar[str] = _OP
    options: PickOptions

    def __call__(self, movement: Movement, operands: Operands, gathered: Gathered) -> Outputs:
        exchange = movement.call.exchange
        (q, weights), (k,) = movement.send(gathered, operands).completed(exchange)
        picks = jnp.asarray(pick_keys(self.options, q, k, weights, gathered.rows))
        # Rows that do not come back are 0 there.
        picks, _ = movement.give_back(gathered, picks + 1, jnp.zeros(())).completed(exchange)
        return Outputs(named_context(picks - 1))

    def shape(self, operands: Operands) -> Any:
        groups = operands.q[0].shape[:3]
        return jax.ShapeDtypeStruct((*groups, self.options.num_keys), jnp.int32)
