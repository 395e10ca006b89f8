"""`zigzag_permutation` is the order of blocks that it documents, and its inverse undoes it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

from jax_cp_dispatch.documents import zigzag_permutation


@given(num_ranks=st.integers(1, 40), per_rank=st.integers(0, 40))
@examples(15)
def test_zigzag_permutation_is_that_of_blocks(num_ranks, per_rank):
    num_tokens = num_ranks * per_rank
    order = zigzag_permutation(num_tokens, num_ranks)
    back = zigzag_permutation(num_tokens, num_ranks, inverse=True)
    np.testing.assert_array_equal(order[back], np.arange(num_tokens))
    first, last = (per_rank + 1) // 2, per_rank // 2
    lengths = [first] * num_ranks + [last] * num_ranks
    blocks = np.split(np.arange(num_tokens), np.cumsum(lengths)[:-1])
    want = [blocks[i] for rank in range(num_ranks) for i in (rank, 2 * num_ranks - 1 - rank)]
    np.testing.assert_array_equal(order, np.concatenate(want))


@pytest.mark.parametrize("num_tokens, num_ranks", [(7, 2), (4, 0), (-2, 2)])
def test_tokens_that_cannot_be_split_are_rejected(num_tokens, num_ranks):
    with pytest.raises(ValueError, match=f"{num_tokens} tokens cannot be split over {num_ranks}"):
        zigzag_permutation(num_tokens, num_ranks)
