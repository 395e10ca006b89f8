"""The reference: `jax.nn.dot_product_attention` of each document, on one device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch.demo.packing import PackedDocuments

_LEAST_ROWS = 256  # documents are padded to powers of two from here, so that few programs compile


def largest_difference(
    packed: PackedDocuments, operands: Any, results: Any, show: Callable[[float], None]
) -> dict[str, float]:
    """Returns the largest difference from dense attention, relative to the largest entry.

    Args:
      packed: the documents.
      operands: q, k, v and the cotangent `[1, T, heads, H]`, on the host.
      results: the output and the gradients of q, k and v.
      show: reports the share of the work that is done.
    """
    expected = [np.zeros(x.shape, x.dtype) for x in results]
    pairs = np.array([(stop - start) ** 2 for _, start, stop in packed.spans], float)
    for index, (_, start, stop) in enumerate(packed.spans):
        length = stop - start
        num_rows = max(_LEAST_ROWS, 1 << (length - 1).bit_length())
        padding = (0, 0), (0, num_rows - length), (0, 0), (0, 0)  # no earlier query attends it
        document = [np.pad(x[:, start:stop], padding) for x in operands]
        for whole, part in zip(expected, _output_and_gradients(*document), strict=True):
            whole[:, start:stop] = part[:, :length]
        show(pairs[: index + 1].sum() / pairs.sum())
    return {
        name: float(np.abs(got - want).max() / np.abs(want).max())
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }


@jax.jit
def _output_and_gradients(q, k, v, dout):
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(dout)
