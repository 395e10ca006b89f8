"""Invalid masks: each is rejected where it is made."""

from typing import Any, cast

import jax
import numpy as np
import pytest
from refusals import check_names, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch.masks import (
    BlockCausal,
    Blocks,
    Chunked,
    PrefixLM,
    Ranges,
    SharedPrefix,
    SlidingWindow,
    Tree,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")

INTS = np.zeros((2, 6), np.int32)
IDS = np.array([[1, 1, 1, 2, 2, 2]])


def attend(mask):
    q: Any = np.zeros((1, 6, 1, 4), np.float32)
    return cp.local_attention(q, q, q, mask=mask, segment_ids=IDS)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "SlidingWindow": [
        (lambda: SlidingWindow(0), "left is 0; it needs to be at least 1"),
        (lambda: SlidingWindow(3, -1), "right is -1.*at least 0"),
        (lambda: SlidingWindow(3, first=-1), "first is -1; it needs to be at least 0"),
        (lambda: SlidingWindow(3, 1, first=2), "first is 2 and right is 1; .* Omit right, or"),
        (lambda: SlidingWindow(cast(Any, 2.5)), "left is 2.5; it needs to be an int"),
    ],
    "Chunked": [
        (lambda: Chunked(0), "size is 0; it needs to be at least 1"),
        (lambda: Chunked(cast(Any, None)), "size is None; it needs to be an int"),
    ],
    "BlockCausal": [(lambda: BlockCausal(0), "size is 0; it needs to be at least 1")],
    "PrefixLM": [
        (lambda: PrefixLM(INTS), "in_prefix has dtype int32; .*booleans.*Pass"),
        (lambda: PrefixLM(INTS[0] > 0), r"in_prefix has shape \[6\]; it needs to be"),
    ],
    "Blocks": [
        (lambda: Blocks(INTS > 0), "block_ids has dtype bool; it needs to be integers"),
        (lambda: Blocks(cast(Any, [[1]])), "block_ids is of type list.*numpy.asarray"),
    ],
    "SharedPrefix": [
        (lambda: SharedPrefix(INTS[..., None]), r"completion_ids has shape \[2, 6, 1"),
        (lambda: SharedPrefix(np.array([[0, 1, 2, 1]])), "completion 1 begins again at column 3"),
    ],
    "Ranges": [
        (lambda: Ranges(INTS, INTS[:1]), r"k_end has shape \[1, 6\]; .*\[2, 6\], as"),
        (lambda: Ranges(INTS, INTS, q_end=INTS > 0), "q_end has dtype bool"),
    ],
    "Tree": [
        (lambda: Tree(INTS, INTS[:1]), "span_ids has 2 batch rows and parents has 1"),
        (lambda: Tree(INTS, INTS[0]), r"parents has shape \[6\]; it needs to be \[B, T\]"),
        (lambda: Tree(INTS + 6, INTS - 1), r"span_ids\[0, 0\] is 6, but parents has 6 spans"),
        (lambda: Tree(INTS, INTS - 2), r"parents\[0, 0\] is -2"),
        (lambda: Tree(INTS, INTS), "batch row 0: span 0 is its own ancestor.*Pass -1"),
        (lambda: Tree(np.array([[0, 1, 0]]), np.array([[-1, 0]])), "span 0 is not one run of"),
        (
            lambda: Tree(np.array([[0, 1, 2, 3]]), np.array([[-1, -1, 0, 0]])),
            "span 0 has descendants that do not follow it in one run.*depth-first",
        ),
    ],
    "local_attention": [
        (lambda: attend(PrefixLM(np.array([[1, 1, 0, 0, 1, 0]]) > 0)), "in batch row 0, at column"),
        (
            lambda: attend(SharedPrefix(np.array([[0, 1, 2, 3, 4, 4]]))),
            "at column 3, SharedPrefix .* as of a prompt of one token, give each completion",
        ),
    ],
    "plan_attention": [
        (
            lambda: cp.plan_attention(
                IDS, world_size=1, mask=jax.tree.map(lambda x: x[:, ::-1], Blocks(IDS))
            ),
            "at column 2, Blocks is made of other columns. Make it from whole batch rows",
        )
    ],
    "place_tokens": [
        (
            lambda: cp.place_tokens(
                segment_ids=IDS,
                world_size=1,
                mask=jax.tree.map(lambda x: x[:, ::-1], Tree(IDS, np.array([[-1, -1, -1]]))),
            ),
            "Tree has tokens that are not in depth-first order, or is made of other columns",
        )
    ],
}


def test_the_list_is_of_public_functions():
    check_names(CASES)


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
