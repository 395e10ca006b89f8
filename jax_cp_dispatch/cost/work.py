"""The work of attention: its shapes and documents, floating-point operations, bytes of rows."""

import dataclasses
from typing import cast

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of attention, with its sequence sharded equally over the ranks.

    Attributes:
      num_ranks: ranks over which the sequence is sharded.
      tokens_per_rank: tokens of each batch row on one rank.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_size: elements of a head.
      itemsize: bytes of an element of q, k, v and the output.
      lengths: tokens of the documents of each batch row, in order; the rest of a row is padding.
        None: one batch row with one document.
      mask: see `context_parallel_attention`; None is causal. Its arrays, if any, are NumPy's, of
        all columns of the ranks, where the documents follow one another from the first.
      latent_size: elements of a latent row, which moves in place of keys and values (`expand=`).
      expand_flops: floating-point operations that expand one row, forward.
    Raises:
      TypeError, ValueError: the documents of a batch row exceed the row, or an argument is invalid.
    """

    num_ranks: int
    tokens_per_rank: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int
    lengths: tuple[tuple[int, ...], ...] | None = None
    mask: Mask | str | None = None
    latent_size: int | None = None
    expand_flops: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("num_ranks", "num_heads", "num_kv_heads", "head_size", "itemsize")
        check_positive("Workload", **{name: getattr(self, name) for name in sizes})
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Workload: {self.num_heads} query heads cannot share {self.num_kv_heads} KV "
                "heads; num_heads must be a multiple of num_kv_heads."
            )
        num_tokens = self.num_ranks * self.tokens_per_rank
        mask = read_mask_on_host("Workload", self.mask, (len(self.rows), num_tokens))
        object.__setattr__(self, "mask", mask)
        longest = max(map(sum, self.rows), default=0)
        if longest > num_tokens:
            raise ValueError(
                f"Workload: the documents of a batch row have {longest} tokens, but the ranks hold "
                f"{self.num_ranks} x {self.tokens_per_rank} = {num_tokens}. Pass "
                f"tokens_per_rank>={-(-longest // self.num_ranks)}, or fewer documents."
            )

    @property
    def visible(self) -> Mask:
        """`mask`, as an object."""
        return cast(Mask, self.mask)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """`lengths`, or its default."""
        one_document = ((self.num_ranks * self.tokens_per_rank,),)
        return one_document if self.lengths is None else self.lengths

    @property
    def rows_per_rank(self) -> int:
        """Tokens of all batch rows on one rank."""
        return self.tokens_per_rank * len(self.rows)

    def q_bytes(self, num_tokens: int | float) -> int | float:
        """Bytes of `num_tokens` rows of q, or of the output."""
        return num_tokens * self.num_heads * self.head_size * self.itemsize

    def kv_bytes(self, num_tokens: int | float, *, itemsize: int | None = None) -> int | float:
        """Bytes of `num_tokens` rows of what moves: keys and values, or latents.

        For gradients in float32, pass itemsize 4.
        """
        size = self.latent_size or 2 * self.num_kv_heads * self.head_size
        return num_tokens * size * (itemsize or self.itemsize)


def attention_flops(
    num_pairs: int | float,
    *,
    num_heads: int,
    head_size: int,
    value_head_size: int | None = None,
    backward: bool = False,
) -> float:
    """Floating-point operations of the matrix products of attention over `num_pairs` pairs.

    A multiply-add counts as two. The forward pass makes two products (QKᵀ, PV); the backward pass
    makes five, because it recomputes the logits (QKᵀ, dO Vᵀ, Pᵀ dO, dS K, dSᵀ Q).

    Args:
      num_pairs: query-key pairs that the mask admits, as in `Plan.pairs`.
      num_heads: query heads.
      head_size: size of a query or key head.
      value_head_size: size of a value head; None means `head_size`.
      backward: count the backward pass alone instead of the forward pass.
    Returns:
      Floating-point operations, as a float.
    """
    value_head_size = head_size if value_head_size is None else value_head_size
    per_pair = 3 * head_size + 2 * value_head_size if backward else head_size + value_head_size
    return 2.0 * num_pairs * num_heads * per_pair


def rows_bytes(num_rows: int, *, num_heads: int, head_size: int, itemsize: int) -> int:
    """Bytes of `num_rows` rows of `num_heads` heads of `head_size` elements of `itemsize` bytes."""
    return num_rows * num_heads * head_size * itemsize
