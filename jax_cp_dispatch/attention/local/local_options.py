"""The options of local attention: those of the caller, and those of its passes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_cp_dispatch.attention.local.check_operands import (
    check_blocks,
    check_operands,
    check_softmax,
    divisors,
)

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
