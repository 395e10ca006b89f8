"""What attention costs: floating-point operations of query-key pairs, bytes of rows that move."""


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
    makes five, because it computes the logits again (QKᵀ, dO Vᵀ, Pᵀ dO, dS K, dSᵀ Q).

    Args:
      num_pairs: query-key pairs that the mask lets through, as in `AttentionPlan.pairs_after`.
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
