"""The options of local attention: those of the caller, and those of its passes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np

# ---- Checks dtypes, shapes and options of local attention.

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_operands(name: str, q: Any, k: Any, v: Any) -> None:
    """Requires queries, keys and values of one dtype, whose heads match."""
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must have "
            "the same one: bfloat16, float16, float32 or float64. Cast them."
        )
    (N, H), K = q.shape[2:], k.shape[2]
    if K == 0 or N == 0 or N % K:
        raise ValueError(
            f"{name}: {N} query heads cannot share {K} KV heads; N must be a multiple of K."
        )
    for heads, size in (("q and k", H), ("v", v.shape[3])):
        if size == 0:
            raise ValueError(
                f"{name}: heads of {heads} have size 0; they need at least one feature."
            )


def check_result_dtype(name: str, what: str, asked: Any, dtypes: tuple[Any, Any]) -> Any:
    """Returns the dtype that is asked for: that of the operands, or by default that of sums."""
    of_operands, of_sums = map(jnp.dtype, dtypes)
    if asked is None:
        return of_sums
    if jnp.dtype(asked) not in (of_operands, of_sums):
        raise ValueError(
            f"{name}: {what} is {jnp.dtype(asked)}, but must be the dtype of q, {of_operands}, or "
            f"{of_sums}. Pass one of them, or None for {of_sums}."
        )
    return jnp.dtype(asked)


def check_softmax(name: str, scale: Any, logit_soft_cap: Any) -> None:
    """Requires numbers that are known when a program is traced, or None."""
    _check_number(name, "scale", scale)
    _check_number(name, "logit_soft_cap", logit_soft_cap)
    if logit_soft_cap is not None and not float(logit_soft_cap) > 0:
        raise ValueError(
            f"{name}: logit_soft_cap is {float(logit_soft_cap)}, but must be > 0, or None."
        )


def check_blocks(name: str, block_q, block_kv, block_heads, *, num_kv_heads: int) -> None:
    """Requires sizes of blocks, or None."""
    for what, number in (("block_q", block_q), ("block_kv", block_kv)):
        is_integer = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
        if number is not None and not (is_integer and number >= 1):
            raise ValueError(f"{name}: {what} is {number}, but must be an integer >= 1, or None.")
    is_integer = isinstance(block_heads, (int, np.integer))
    if block_heads is not None and not (is_integer and block_heads in divisors(num_kv_heads)):
        raise ValueError(
            f"{name}: block_heads is {block_heads}, but must be an integer that divides the "
            f"{num_kv_heads} KV heads, or None."
        )


def _check_number(name: str, what: str, value: Any) -> None:
    try:
        if not isinstance(value, bool | np.bool_ | str | bytes):
            float(0 if value is None else value)
            return
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{name}: {what} is {value!r}, but must be a number that is known when the program is "
        "traced, or None."
    )


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


CAUSAL, FULL = "causal", "full"
_VECTOR = 8  # rows
# Rows of a block's matrix. On CPU, XLA multiplies 256 x 256 blocks with heads of 64 on one thread
# (65 of 125 GFLOP/s on 2 cores), 512 x 512 on all; larger blocks waste more work.
_BLOCK = 512
# Of the blocks of several heads: larger products and passes wait less often for all threads (2
# cores: 2.3 s without, 1.8 s with 4 heads, 8K tokens forward and backward).
_LOGITS = 4 * _BLOCK * _BLOCK


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """The options of `local_attention` as passed to `op`; None selects from the shapes."""

    op: str
    scale: float | None = None
    logit_soft_cap: float | None = None
    block_q: int | None = None
    block_kv: int | None = None
    block_heads: int | None = None
    return_max_logits: bool = False

    def resolved(self, q, k, v) -> PassOptions:
        """Selects missing options from the shapes; raises the errors of `local_attention`."""
        check_operands(self.op, q, k, v)
        check_softmax(self.op, self.scale, self.logit_soft_cap)
        blocks = self.block_q, self.block_kv, self.block_heads
        check_blocks(self.op, *blocks, num_kv_heads=k.shape[2])
        return self.passes(q, k)

    def passes(self, q, k, **dtypes: Any) -> PassOptions:
        """`resolved` of options and arrays that are checked already."""
        (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
        block_q = self.block_q or even_block(T, max(128, _BLOCK // (N // K)))
        block_kv = self.block_kv or even_block(S, _BLOCK)
        block_heads = self.block_heads or _heads_together(K, N // K * block_q * block_kv)
        return PassOptions(
            scale=H**-0.5 if self.scale is None else float(self.scale),
            logit_soft_cap=None if self.logit_soft_cap is None else float(self.logit_soft_cap),
            block_q=block_q,
            block_kv=block_kv,
            block_heads=int(block_heads),
            return_max_logits=self.return_max_logits,
            kv_heads=K,
            **dtypes,
        )


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """The resolved options of the passes; static."""

    scale: float
    logit_soft_cap: float | None
    block_q: int
    block_kv: int
    block_heads: int  # KV heads of a batch row whose blocks are computed together
    return_max_logits: bool = False
    kv_heads: int = 1  # of a batch row: that many matrices in turn have the same ranges
    # Of calls on whole arrays.
    dense: str | None = None  # all ranges are those of one document: CAUSAL or FULL
    out_dtype: Any = None
    gradient_dtypes: tuple[Any, ...] = ()  # of q, k and v


def _heads_together(num_groups: int, logits_of_head: int) -> int:
    """Returns the most KV heads that divide their number within `_LOGITS`, at least one."""
    return max(x for x in divisors(num_groups) if x == 1 or x * logits_of_head <= _LOGITS)


def rank_blocks(num_queries, num_keys, num_heads, num_groups, *, rows) -> dict[str, int]:
    """Returns block sizes for ranks that compute at the same time.

    Together they keep all cores busy, so a product need not use several threads. Small blocks of
    one head stay in the caches and follow the ranges closely. `rows` is the row count of a query
    block's matrix.
    """
    block_q = max(64, rows * num_groups // max(1, num_heads))
    return {
        "block_q": even_block(num_queries, block_q),
        "block_kv": even_block(num_keys, 128),
        "block_heads": 1,
    }


def even_block(length: int, block: int) -> int:
    """Returns a size near `block`, in whole vectors, that covers the length with least waste.

    The largest of several candidates; for a short axis its length, rounded up.
    """
    if length <= block * 3 // 2:
        return max(1, -(-length // _VECTOR)) * _VECTOR
    sizes = range(block * 3 // 4 // _VECTOR * _VECTOR, block * 5 // 4 + 1, _VECTOR)
    return min(sizes, key=lambda size: (-length % size, -size))


# ---- Arguments that other libraries' attention takes: an error says what to pass here instead.

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_NO_BIAS = "a bias of the logits is not supported. Omit it, or call jax.nn.dot_product_attention"
_NO_DROPOUT = "attention weights are never stored, so they cannot be dropped. Omit it"
_MASK = "pass mask='causal' or 'full', or an object of jax_cp_dispatch.masks"
_WINDOW = "pass mask=masks.SlidingWindow(left, right), where left counts the query's own key"
_DOCUMENTS = "documents are named by segment_ids, one for each token"
_SCALE = "pass scale="
_SOFT_CAP = "pass logit_soft_cap="
_SINK = "pass sink=, one logit for each query head"
_LSE = "pass return_lse=True, return_max_logits=True"

# By jax.nn, PyTorch, flash-attn, Flax, Transformer Engine, MaxText, splash attention and tokamax.
PEER_ARGUMENTS = {
    **dict.fromkeys(("bias", "attn_bias", "score_mod", "relative_bias"), _NO_BIAS),
    **dict.fromkeys(("alibi", "alibi_slopes", "use_alibi"), _NO_BIAS),
    **dict.fromkeys(("dropout", "dropout_rate", "dropout_p", "dropout_rng", "dropout_prob"),
                    _NO_DROPOUT),
    **dict.fromkeys(("deterministic", "dropout_mask", "attention_dropout"), _NO_DROPOUT),
    **dict.fromkeys(("causal", "is_causal", "attn_mask", "attention_mask", "attn_mask_type",
                     "mask_type", "mask_value"), _MASK),
    **dict.fromkeys(("window", "window_size", "sliding_window", "sliding_window_size",
                     "local_window_size"), _WINDOW),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_k", "seqlens",
                     "decoder_segment_ids", "q_segment_ids", "kv_segment_ids", "sequence_ids",
                     "query_seq_lengths", "key_value_seq_lengths"), _DOCUMENTS),
    **dict.fromkeys(("sm_scale", "softmax_scale", "scale_factor", "scaling", "logits_scale"),
                    _SCALE),
    **dict.fromkeys(("softcap", "soft_cap", "attn_logits_soft_cap", "logits_soft_cap",
                     "attn_logit_softcapping"), _SOFT_CAP),
    **dict.fromkeys(("sinks", "softmax_offset", "s_aux", "attention_sink", "softmax_type"), _SINK),
    **dict.fromkeys(("return_attn_probs", "return_residual", "return_residuals",
                     "return_softmax_lse", "return_lse_and_max", "save_residuals"), _LSE),
}  # fmt: skip


def explains_peer_arguments(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Returns the function, with errors that explain arguments of other libraries."""
    known = frozenset(inspect.signature(function).parameters)
    foreign = {name: advice for name, advice in PEER_ARGUMENTS.items() if name not in known}

    @functools.wraps(function)
    def explained(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        for name in kwargs.keys() - known:
            if name in foreign:
                raise TypeError(
                    f"{function.__name__}: {name} is not an argument here: {foreign[name]}. "
                    "See docs/limits.md."
                )
        return function(*args, **kwargs)

    return explained
