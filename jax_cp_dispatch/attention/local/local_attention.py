"""Exact attention of local queries, each over one contiguous range of local keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, DTypeLike, Float, Int, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import only_if_right, sum_dtype
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.local.passes import (
    add_sink,
    forbid_second_derivative,
    fused_attention,
    fused_gradients,
    in_reverse_only,
    sink_gradient,
)
from jax_cp_dispatch.attention.local.picked import (
    DocumentRows,
    PickedRows,
    picked_attention,
    picked_gradients,
    read_picks,
)
from jax_cp_dispatch.attention.local.ranges import (
    CAUSAL,
    FULL,
    KeyQueries,
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    check_heads,
    check_softmax,
    pass_options,
)
from jax_cp_dispatch.documents.documents import (
    Documents,
    attended_tokens,
    read_given,
    read_whole,
    replaced,
    with_segment_ids,
)
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS, check_documents
from jax_cp_dispatch.masks import Causal, Full, Mask, MaskRanges, Selected
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.masks.read import check_mask_arrays

_STEPS_OF_RANGES = {
    **dict.fromkeys(("kv_start", "kv_end"), "Pass one range of keys per query row."),
    **dict.fromkeys(("q_start", "q_end"), "Pass one range of queries per key row."),
}


@door(
    "local_attention",
    **_STEPS_OF_RANGES,
    **STEPS_OF_DOCUMENTS,
    sink="Pass one logit per query head.",
)
def local_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    kv_start: Int[Array, "B T"] | None = None,
    kv_end: Int[Array, "B T"] | None = None,
    *,
    q_start: Int[Array, "B S"] | None = None,
    q_end: Int[Array, "B S"] | None = None,
    mask: Mask | str | None = None,
    documents: Documents | None = None,
    segment_ids: Integer[HostOrDevice, "B S"] | None = None,
    positions: Integer[HostOrDevice, "B S"] | None = None,
    sink: Float[Array, " N"] | None = None,
    return_max_logits: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    out_dtype: DTypeLike | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    block_heads: int | None = None,
) -> tuple[Any, ...]:
    """Computes attention of each query row over a range of key rows, or under a mask.

        visible(i, j) = kv_start[i] <= j < kv_end[i]  and  q_start[j] <= i < q_end[j]

    Without ranges, a mask gives them: within documents of `segment_ids`, or of whole rows. If there
    are fewer queries than keys, the queries are the last T of the S tokens.

    Call anywhere: under `jit`, inside or outside `jax.shard_map` (both values of `check_vma`),
    under `remat`, `scan` and `vmap`. Nothing of size `T * S` is ever stored, and key blocks that no
    row of a query block needs are skipped at run time. Bitwise repeatable, except with cuDNN on
    GPUs: see docs/gpu_attention.md. It has no sharding rule: outside `shard_map`, XLA gathers
    sharded arrays, and JAX rejects arrays that are sharded over explicit axes. Use
    `context_parallel_attention` for these (`batch_axis`, `head_axis`).

    Query head n reads KV head `n // (N / K)`. Unused rows are not read: key rows outside every
    range and query rows with an empty range do not affect results or gradients, even if they
    contain NaN. A NaN in a used key row may reach other queries.

    Differentiable once, in reverse mode, in `out` and `lse` with respect to `q`, `k`, `v`;
    accumulated in float32 and rounded once to their dtype.

    Args:
      q: queries; bfloat16, float16, float32 or float64, as `k` and `v`.
      k: keys; N must be a multiple of K.
      v: values.
      kv_start: first key row of each query. Ranges are clipped to `[0, S]`.
      kv_end: one past the last key row; a range with `kv_end <= kv_start` is empty.
      q_start, q_end: the query rows [q_start, q_end) that may see each key row; None: all.
      mask: instead of ranges: "full", "causal" or an object of `jax_cp_dispatch.masks`, whose
        arrays are `[B, S]`; None is causal. With `Selected` picks that cannot be of these tokens,
        the output is NaN.
      documents: with a mask only: those of all S tokens, in packed order.
      segment_ids, positions: the short form, see `context_parallel_attention`.
      sink: a learned logit per head without a value: it adds `exp(sink)` to the denominator of each
        row with keys. Differentiable.
      return_max_logits: also return the largest logit of each head, over all rows: scaled and
        capped, without the sink and without derivative.
      scale: factor on the logits, `1 / sqrt(H)` if None.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      out_dtype: of `out`: that of q, or None for the dtype of sums. Pass `q.dtype` unless results
        are merged: it saves memory, and on GPUs a pass over `out`. The derivative keeps `out`.
      block_q: query rows per block; None chooses from the shapes.
      block_kv: key rows per block; None chooses from the shapes.
      block_heads: KV heads whose blocks are computed together, a divisor of K; None chooses from
        the shapes.
    Returns:
      out: in `out_dtype`, or float32 (float64 for float64 inputs); zero where the range is empty.
      lse: logarithm of the denominator, `[B, N, T]`; `-inf` where the range is empty.
      max_logits: only if asked for, `[N]`; `-inf` if no query has keys.
    Raises:
      TypeError: other dtypes than above, or ranges that are not integers.
      ValueError: shapes do not match, or an option is out of range.
    References:
      Dao, FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.
    """
    op = "local_attention"
    softmax = {"scale": scale, "logit_soft_cap": logit_soft_cap}
    blocks = {"block_q": block_q, "block_kv": block_kv, "block_heads": block_heads}
    _check_options(op, q, k, v, softmax, blocks)
    given, named = MaskRanges(kv_start, kv_end, q_start, q_end), (segment_ids, positions, mask)
    if kv_start is None and kv_end is None:
        ranges, dense = _read_mask(q, k, given, documents, named)
    elif documents is None and all(x is None for x in named):
        ranges, dense = _read_ranges(op, q.shape[:2], given), None
    else:
        raise TypeError(
            f"{op}: got ranges of keys, and a mask or documents. Pass either kv_start and kv_end, "
            "or mask, segment_ids and positions."
        )
    options = pass_options(
        *(q, k),
        **softmax,
        **blocks,
        return_max_logits=return_max_logits,
        dense=dense,
        pick_block=mask.block if isinstance(mask, Selected) else 0,
        out_dtype=_read_dtype(op, "out_dtype", out_dtype, q),
        gradient_dtypes=(q.dtype,) * 3,
    )
    q, k, v, sink = jax.tree.map(functools.partial(in_reverse_only, op), (q, k, v, sink))
    with jax.disable_jit(False):  # see `_attend`; the user may have disabled it
        outputs = _attend(options, *vary_alike((q, k, v, ranges, sink)))
    if isinstance(ranges, PickedRows):
        is_right = ranges.rows.are_picks(ranges.picks, options.pick_block)
        outputs = only_if_right(is_right, outputs)
    return outputs


@door("local_attention_backward", **_STEPS_OF_RANGES)
def local_attention_backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    kv_start: Int[Array, "B T"],
    kv_end: Int[Array, "B T"],
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    dout: Float[Array, "B T N Hv"],
    dlse: Float[Array, "B N T"] | None = None,
    *,
    q_start: Int[Array, "B S"] | None = None,
    q_end: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    dq_dtype: DTypeLike | None = None,
    dkv_dtype: DTypeLike | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    block_heads: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
    """Computes the gradients of merged attention for one set of keys.

    `out` and `lse` are those of the whole softmax, with its sink; `k`, `v` and the ranges are any
    part of its keys. The sum of all parts' `dq` is the gradient of q; `dk` and `dv` are final. With
    one part, this is the derivative of `local_attention`. Call where `local_attention` may be
    called. Not differentiable.

    Args:
      q, k, v, kv_start, kv_end, q_start, q_end: as in `local_attention`, and so are all options.
      out: merged output.
      lse: merged logarithm of the sum of exponentials; `-inf` gives zero gradients.
      dout: cotangent of `out`.
      dlse: cotangent of `lse`; None is zero.
      dq_dtype, dkv_dtype: of the results: that of q, or None for the dtype of sums.
    Returns:
      dq, dk, dv: in float32 (float64 for float64 inputs), unless other dtypes are asked for.
    Raises:
      TypeError, ValueError: as `local_attention`.
    """
    op = "local_attention_backward"
    softmax = {"scale": scale, "logit_soft_cap": logit_soft_cap}
    blocks = {"block_q": block_q, "block_kv": block_kv, "block_heads": block_heads}
    _check_options(op, q, k, v, softmax, blocks)
    of_q = _read_dtype(op, "dq_dtype", dq_dtype, q)
    of_kv = _read_dtype(op, "dkv_dtype", dkv_dtype, q)
    options = pass_options(q, k, **softmax, **blocks, gradient_dtypes=(of_q, of_kv, of_kv))
    given = MaskRanges(kv_start, kv_end, q_start, q_end)
    ranges = _read_ranges(op, q.shape[:2], given)
    whole = SoftmaxGradients(out, lse, dout, dlse)
    q, k, v, whole = forbid_second_derivative(op, (q, k, v, whole))
    return range_gradients(options, q, (k, v), ranges, whole)


def _check_options(op: str, q, k, v, softmax: dict[str, Any], blocks: dict[str, Any]) -> None:
    check_heads(op, q, k, v)
    check_softmax(op, **softmax)
    K = k.shape[2]
    for what, number in blocks.items():
        divides = what == "block_heads"
        fits = isinstance(number, int | np.integer) and not isinstance(number, bool)
        fits = fits and number >= 1 and not (divides and K % number)
        if number is not None and not fits:
            needed = f"an integer that divides the {K} KV heads" if divides else "an integer >= 1"
            raise ValueError(f"{op}: {what} is {number}, but must be {needed}, or None.")


def _read_dtype(op: str, what: str, asked: Any, q: Any) -> Any:
    """Returns the dtype that is asked for: that of q, or by default that of sums."""
    of_operands, of_sums = jnp.dtype(q.dtype), jnp.dtype(sum_dtype(q.dtype))
    if asked is None:
        return of_sums
    if jnp.dtype(asked) not in (of_operands, of_sums):
        raise ValueError(
            f"{op}: {what} is {jnp.dtype(asked)}, but must be the dtype of q, {of_operands}, or "
            f"{of_sums}. Pass one of them, or None for {of_sums}."
        )
    return jnp.dtype(asked)


def _read_ranges(op: str, shape: tuple[int, ...], given: MaskRanges) -> RowRanges:
    """Returns the ranges of rows; `shape` is B and T."""
    needed = {"kv_start": given.k_start, "kv_end": given.k_end}
    if given.q_start is not None or given.q_end is not None:
        needed |= {"q_start": given.q_start, "q_end": given.q_end}
    for name, x in needed.items():
        if x is None:
            raise TypeError(f"{op}: {name} is missing; a range has a start and an end. Pass it.")
    return RowRanges.of_mask(given, shape)


def _read_mask(
    q: Any, k: Any, given: MaskRanges, documents: Any, named: tuple[Any, Any, Any]
) -> tuple[RowRanges | PickedRows, str | None]:
    """Returns the ranges of a mask or what is picked, and how they are dense, if that is known.

    `named` are segment ids, positions and the mask.
    """
    op, T, shape, mask = "local_attention", q.shape[1], k.shape[:2], named[2]
    S = shape[1]
    if given.q_start is not None or given.q_end is not None:
        raise TypeError(
            f"{op}: got q_start or q_end without kv_start and kv_end. Pass all four, or "
            "mask=masks.Ranges(...)."
        )
    packed = read_given(op, documents, *named, follows_plan=False)
    if packed.order != PACKED:
        raise ValueError(
            f"{op}: the documents are in {packed.order}, of which a rank holds a part. "
            "Pass documents in packed order, or call context_parallel_attention."
        )
    if T > S:
        raise ValueError(
            f"{op}: got {T} queries and {S} keys; with a mask, queries are the last of the keys' "
            "tokens. Pass kv_start and kv_end."
        )
    dense = None
    if packed.segment_ids is None and packed.positions is None:
        simple = packed.mask.simplified()
        dense = CAUSAL if isinstance(simple, Causal) and T == S else None
        dense = FULL if isinstance(simple, Full) else dense
    check_documents(op, packed.segment_ids, packed.positions, shape, "k has B, S =")
    check_mask_arrays(op, packed.mask, shape)
    packed = read_whole(op, packed, 1)
    if packed.positions is not None:
        packed = with_segment_ids(packed, shape)
    if isinstance(mask, Selected):
        picks = read_picks(op, mask, (*shape, q.shape[2]), k.shape[2])
        return _picked_tokens(packed, jnp.asarray(picks)[:, S - T :], S), None
    ranges = attended_tokens(jax.tree.map(jnp.asarray, packed), shape)
    start, end = (x[:, S - T :] for x in ranges[:2])
    if ranges.q_start is None:
        return RowRanges(start, end), dense
    index = jnp.broadcast_to(jnp.arange(S - T, S, dtype=jnp.int32), (shape[0], T))
    return RowRanges(start, end, KeyQueries(index, ranges.q_start, ranges.q_end)), dense


def _picked_tokens(packed: Documents, picks: Array, num_keys: int) -> PickedRows:
    """Returns what the last of the tokens `[B, S]` of these documents have picked."""
    B, T = picks.shape[:2]
    packed = jax.tree.map(jnp.asarray, packed)
    documents = attended_tokens(replaced(packed, mask=Full()), (B, num_keys))
    shown = attended_tokens(packed, (B, num_keys))
    first, start, end = (
        x[:, num_keys - T :] for x in (documents.k_start, shown.k_start, shown.k_end)
    )
    place = jnp.arange(num_keys - T, num_keys, dtype=jnp.int32)[None] - first
    return PickedRows(picks, DocumentRows(start, end, first, place))


# ---- Attention of checked arguments, and its derivative.


@functools.partial(jax.jit, static_argnums=0)
def attend_ranges(
    options: PassOptions, q: Array, kv: Any, ranges: RowRanges | PickedRows, sink: Array | None
) -> tuple[Array, ...]:
    """`local_attention` of checked arguments, without a derivative: for the rules of others."""
    q, kv, ranges, sink = vary_alike((q, kv, ranges, sink))
    (B, T, N, _), (S, _, Hv) = q.shape, kv[-1].shape[1:]
    Hv = options.value_size or Hv
    if B * T * S == 0:
        dtype = sum_dtype(q.dtype)
        empty = [jnp.zeros((B, T, N, Hv), options.out_dtype), jnp.full((B, N, T), -jnp.inf, dtype)]
        empty += [jnp.full(N, -jnp.inf, dtype)] * options.return_max_logits
        return tuple(vary_alike(empty, like=q))
    sink = None if sink is None else jnp.broadcast_to(sink, (B, N))
    if isinstance(ranges, PickedRows):
        out, lse, *max_logits = picked_attention(options, q, kv, ranges, sink)
    else:
        k, v = kv
        out, lse, *max_logits = fused_attention(options, q, k, v, ranges, sink)
    return out, lse, *(jnp.max(x, axis=(0, 2)) for x in max_logits)


@functools.partial(jax.jit, static_argnums=0)
def range_gradients(
    options: PassOptions,
    q: Array,
    kv: Any,
    ranges: RowRanges | PickedRows,
    whole: SoftmaxGradients,
) -> tuple[Array, ...]:
    """`local_attention_backward` of checked arguments."""
    q, kv, ranges, whole = vary_alike((q, kv, ranges, whole))
    if q.shape[0] * q.shape[1] * kv[0].shape[1] == 0:
        arrays = zip((q, *kv), options.gradient_dtypes, strict=False)
        return vary_alike(tuple(jnp.zeros(x.shape, dtype) for x, dtype in arrays), like=q)
    if isinstance(ranges, PickedRows):
        return picked_gradients(options, q, kv, ranges, whole)
    k, v = kv
    return fused_gradients(options, q, k, v, ranges, whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, ranges, sink):
    return attend_ranges(options, q, (k, v), ranges, sink)


def _attention_fwd(options, *primals):
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    q, k, v, ranges, sink = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    q, k, v = forbid_second_derivative("local_attention", (q, k, v))
    out, lse, *rest = named_context(attend_ranges(options, q, (k, v), ranges, sink))
    return (out, lse, *rest), (q, k, v, ranges, out, lse, sink)


def _attention_bwd(options, residuals, cotangents):
    dout, dlse, *_ = cotangents
    q, k, v, ranges, out, lse, sink = residuals
    if isinstance(dout, SymbolicZero):
        dout = vary_alike(jnp.zeros_like(out), like=q)
    dlse = None if isinstance(dlse, SymbolicZero) else dlse  # most programs use `out` alone
    dout, dlse = forbid_second_derivative("local_attention", (dout, dlse))
    whole = SoftmaxGradients(out, lse, dout, dlse)
    options = dataclasses.replace(options, return_max_logits=False)
    grads = range_gradients(options, q, (k, v), ranges, whole)
    dsink = None if sink is None else sink_gradient(sink, whole)
    return *grads, None, dsink


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
# Under jit, because shard_map outside of jit takes no symbolic zeros.
_attend = jax.jit(_attention, static_argnums=0)


# ---- Merges two attention results over disjoint keys into the result over both.


@door("merge_partials", sink="Pass one logit per query head.")
def merge_partials(
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    block_out: Float[Array, "B T N Hv"],
    block_lse: Float[Array, "B N T"],
    *,
    sink: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Merges two attention results, weighted by their shares of the softmax's denominator.

    Call anywhere. Associative and commutative up to rounding; `(0, -inf)` is the neutral element
    and does not change the other side. Differentiable in all arguments; if both sides are
    `-inf`, the result is `(0, -inf)` with zero gradients.

    Args:
      out: output over the keys seen so far; zero where `lse` is `-inf`.
      lse: the logarithm of the sum of exponentials of the logits of these keys.
      block_out: output over further keys.
      block_lse: the same for the further keys.
      sink: a logit per head without a value, see `local_attention`. Pass it with the last part
        only: it joins the denominator once.
    Returns:
      out, lse: over all keys, in float32 (float64 if an argument is float64).
    Raises:
      ValueError: shapes do not match.
    References:
      Dao, FlashAttention (arXiv:2205.14135), section 3.1.
    """
    dtype = sum_dtype(*(x.dtype for x in (out, lse, block_out, block_lse)))
    out, lse, block_out, block_lse = (x.astype(dtype) for x in (out, lse, block_out, block_lse))

    # The peak cancels, so it needs no derivative; a finite one keeps -inf minus -inf from NaN.
    peak = lax.stop_gradient(jnp.maximum(lse, block_lse))
    peak = jnp.where(peak > -jnp.inf, peak, 0)
    weight, block_weight = jnp.exp(lse - peak), jnp.exp(block_lse - peak)
    total = weight + block_weight
    empty = total == 0
    total = jnp.where(empty, 1, total)

    def per_row(share):
        return jnp.swapaxes(share, 1, 2)[..., None]

    merged = per_row(weight / total) * out + per_row(block_weight / total) * block_out
    return add_sink(merged, jnp.where(empty, -jnp.inf, peak + jnp.log(total)), sink)
