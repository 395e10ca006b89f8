"""`ulysses_attention`: each rank computes a share of the heads, over whole documents."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.check_arguments import read_rows
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.peer_arguments import explains_peer_arguments
from jax_cp_dispatch.attention.ulysses.attend import attend_ulysses
from jax_cp_dispatch.masks import Mask


@explains_peer_arguments
def ulysses_attention(
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
    """Computes attention over a sequence sharded over a mesh axis; ranks share the heads.

    An all-to-all gives each rank all tokens of its N / W query heads and of the KV heads that these
    read. The rank computes attention over whole documents, and a second all-to-all returns the
    output. All ranks have equal work, whatever the mask and the documents. A rank sends (W - 1) / W
    of its rows of q, k, v and the output, once.

    If W does not divide K, KV heads are repeated before they move, lcm(K, W) / K times.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Differentiable once, in
    reverse mode, by the same exchanges in reverse; gradients of repeated KV heads are summed in
    float32. Residuals per rank: its heads of q, k, v and the output, of all tokens, its lse, and
    the ranges of all tokens.

    Args:
      q: this rank's T rows of the sequence; any T, the same on every rank. W ranks divide N.
      k, v, axis_name, mask, segment_ids, positions: as `ring_attention`.
      layout, sink, return_lse, return_max_logits, scale, logit_soft_cap: as `ring_attention`.
      implementation, deadline, num_comm_sm: likewise; "xla" makes an all-to-all of each array.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      ValueError: W does not divide N; or as `ring_attention`.
      TypeError, jax.errors.JaxRuntimeError: as `ring_attention`.
    References:
      Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
    """
    options = AttentionOptions(
        read_options(
            "ulysses_attention",
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
    return options.returned(attend_ulysses(options, operands, packed))
