"""Ring attention: keys and values rotate through the ranks as a whole."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms import Ring, Zigzag
from jax_cp_dispatch.attention.check_arguments import read_rows
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.peer_arguments import explains_peer_arguments
from jax_cp_dispatch.attention.rotating.call import rotating_attention
from jax_cp_dispatch.masks import Mask


@explains_peer_arguments
def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    mask: Mask | str | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes attention over a sequence sharded over a mesh axis; queries do not move.

    In each of n steps, a rank computes attention over the keys and values that it holds and sends
    them to the next rank. There are n - 1 exchanges, each started before the step's attention. With
    causal attention of contiguous parts, the last rank works at every step but the first rank at
    only one; see `zigzag_ring_attention`.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Differentiable once, in
    reverse mode; keys and values rotate again, and their gradients with them in float32 (n
    exchanges). Residuals per rank: q, k, v, the unrounded output, its lse, and the ranges of its
    rows.

    Rows of padding are not read, even if they contain NaN. A NaN in a token may reach tokens of
    other documents in the same block.

    Args:
      q: this rank's T rows of the sequence; any T, the same on every rank.
      k: keys, in the dtype of q; K divides N.
      v: values.
      axis_name: the mesh axis of the ranks, or several, major axis first.
      mask: which keys of its document a token sees: "causal", "full", or an object of
        `jax_cp_dispatch.masks`; None is causal.
      segment_ids: the document of each token; padding is 0 (or less). None: each batch row is one
        document.
      positions: the position of each token in its document; None if segment ids alone separate the
        documents. Both are gathered from all ranks, 4 bytes per token.
      layout: the layout of the sequence on the ranks: "contiguous" or "zigzag", see
        `zigzag_permutation`.
      sink: a learned logit for each query head, without a value: it adds `exp(sink)` to the
        denominator of each row with keys. Differentiable; gradients are summed over all ranks.
      return_lse: also return `lse` `[B, T, N]`, differentiable: the logarithm of the denominator
        (with the sink), in float32 (float64 for float64), -inf for padding.
      return_max_logits: also return the largest logit of each head `[N]`, of all ranks and rows,
        scaled and capped, without the sink and without derivative. The result is then `(out, lse)`,
        `(out, max_logits)` or `(out, lse, max_logits)`.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation, deadline, num_comm_sm: see `ring_exchange`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes, dtypes or options are invalid; the message says how to fix
        them.
      jax.errors.JaxRuntimeError: see `dispatch`.
    References:
      Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """
    options = AttentionOptions(
        read_options(
            "ring_attention",
            axis_name,
            implementation=implementation,
            deadline=deadline,
            num_comm_sm=num_comm_sm,
        ),
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    operands = Operands(q, k, v, sink)
    packed = read_rows(options.op, operands, mask, segment_ids, positions)
    outputs = rotating_attention(options, Ring(), operands, packed)
    return options.returned(outputs)


@explains_peer_arguments
def zigzag_ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    mask: Mask | str | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes ring attention in zigzag layout: equal causal work for all ranks at every step.

    The sequence is cut into 2 n blocks; rank r computes blocks r and 2 n - 1 - r. Contiguous rows
    are first rearranged, and the output is rearranged back, which moves q, k, v and out once each;
    with `layout="zigzag"` nothing is rearranged. Documents that do not span the sequence cause
    unequal work in any fixed layout; see `balanced_attention`.

    Args, Returns, Raises, where to call it, its derivative and its residuals: as `ring_attention`.
    References:
      Zhu, ring-flash-attention (zigzag); Fang and Zhao, USP (arXiv:2405.07719), section 4.
    """
    options = AttentionOptions(
        read_options(
            "zigzag_ring_attention",
            axis_name,
            implementation=implementation,
            deadline=deadline,
            num_comm_sm=num_comm_sm,
        ),
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    operands = Operands(q, k, v, sink)
    packed = read_rows(options.op, operands, mask, segment_ids, positions)
    outputs = rotating_attention(options, Zigzag(), operands, packed)
    return options.returned(outputs)
