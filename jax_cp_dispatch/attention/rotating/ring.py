"""Ring attention: keys and values go round the ranks, whole."""

from __future__ import annotations

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._window import Window
from jax_cp_dispatch.attention.algorithms import Ring, Zigzag
from jax_cp_dispatch.attention.options import AttentionOptions, ExchangeOptions
from jax_cp_dispatch.attention.rotating.call import rotating_attention


def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    causal: bool = True,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    window: Window | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention over a sequence that is sharded over a mesh axis; queries stay where they are.

    n steps: each attends the keys and values held and sends them to the next rank; n - 1
    exchanges, each issued before the step's attention. With causal attention on contiguous parts
    the last rank works at every step and the first only at one: see `zigzag_ring_attention`.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Differentiable once,
    in reverse mode; keys and values go round again, and their gradients with them in float32 (n
    exchanges). Kept for it, per rank: q, k, v, the output before it is rounded, its lse, and the
    ranges of its rows.

    Rows of padding are not read, even if they hold NaN; a NaN in a token may reach tokens of other
    documents that are attended in the same block.

    Args:
      q: this rank's T rows of the sequence, of which every rank holds as many; any T.
      k: keys, of the dtype of q; K divides N.
      v: values.
      axis_name: the mesh axis of the ranks, or several, the major one first.
      causal: a token attends what stands before it in its document, and itself; else all of it.
      segment_ids: the document of each token; padding is 0 (or less). None: each batch row is one
        document.
      positions: the place of each token in its document; None if the segment ids tell documents
        apart. They are gathered from all ranks, 4 bytes a token.
      layout: how the rows of the sequence stand on the ranks: "contiguous" or "zigzag", see
        `zigzag_permutation`.
      window: with `causal`, an int: a token attends at most that many tokens of its document,
        itself the last. Without, a pair (left, right): a token at p attends the tokens p - left,
        ..., p + right of its document; None is no limit on that side.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation, deadline: see `ring_exchange`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      TypeError, ValueError: shapes, dtypes or options do not fit; what, and what to do.
      jax.errors.JaxRuntimeError: see `dispatch`.
    References:
      Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """
    options = AttentionOptions(
        ExchangeOptions("ring_attention", axis_name, implementation, deadline),
        causal=causal,
        window=window,
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
    )
    return rotating_attention(options, Ring(), q, k, v, segment_ids, positions)


def zigzag_ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    causal: bool = True,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    window: Window | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Ring attention in zigzag layout: equal causal work for every rank at every step.

    The sequence is cut into 2 n blocks; rank r computes for blocks r and 2 n - 1 - r. Rows that
    stand in contiguous parts are brought there first and the output is brought back, which moves
    q, k, v and out once each; with `layout="zigzag"` nothing is rearranged. Documents that do not
    span the sequence make unequal work in any fixed layout: see `balanced_attention`.

    Args, Returns, Raises, where to call, derivative and what is kept for it: as `ring_attention`.
    References:
      Zhu, ring-flash-attention (zigzag); Fang and Zhao, USP (arXiv:2405.07719), section 4.
    """
    options = AttentionOptions(
        ExchangeOptions("zigzag_ring_attention", axis_name, implementation, deadline),
        causal=causal,
        window=window,
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
    )
    return rotating_attention(options, Zigzag(), q, k, v, segment_ids, positions)
