"""`token_checksums` in a loader, `check_tokens` in the step: whether arrays are in their order.

A checksum is a sum over tokens of a hash of the value, the segment id and the position, so no order
of the tokens changes it. Arrays that moved without their documents, or otherwise than these, have
another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Names
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, PyTree, Shaped, UInt32

from jax_cp_dispatch._arguments import HostOrDevice, check_type
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options, vary_alike
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import trusted
from jax_cp_dispatch.documents.fingerprint import (
    WRONG_TOKENS,
    confirmed,
    mix,
    order_fingerprint,
)
from jax_cp_dispatch.documents.segment_ids import gather_sequence
from jax_cp_dispatch.global_call import find_axes, fit_documents, on_all_ranks, pad_tokens

_OP, _OF_LOADER = "check_tokens", "token_checksums"
_FACTOR = np.uint32(0x9E3779B1)


@door(_OF_LOADER)
def token_checksums(
    arrays: PyTree[Shaped[HostOrDevice, "B T ..."]], *, documents: Documents
) -> UInt32[HostOrDevice, "B arrays 2"]:
    """Returns checksums of arrays and their documents, for `check_tokens` in the step.

    Call it where tokens and segment ids are made, before anything changes their order. NumPy arrays
    give NumPy, without a device.

    Args:
      arrays: what the order of the documents concerns: tokens, labels, arrays of masks; integers,
        booleans, or floats, which count as float32. Later arrays are checked with those before.
      documents: of these arrays, in packed order, with the ids that they have in the step.
    Raises:
      TypeError, ValueError: an argument is invalid.
    """
    leaves = _read(_OF_LOADER, arrays, documents)
    return _sums((leaves, documents.segment_ids, documents.positions))


@door(_OP, checksums="Pass token_checksums of the same rows and arrays.")
def check_tokens(
    arrays: PyTree[Shaped[HostOrDevice, "B T ..."]],
    checksums: UInt32[HostOrDevice, "B arrays 2"],
    *,
    axis_name: AxisName,
    documents: Documents,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Bool[Array, ""]:
    """Checks that arrays are those of their checksums, in the order of the documents.

    Finds what nothing else can: arrays and documents of different batches, and an array that
    `apply` did not put in order, or twice. Call it once per step, inside `jax.shard_map` over
    `axis_name`, on every rank, or on global arrays. The ranks exchange a few numbers. Arrays that
    are exchanged for others with equal values, ids and positions are not found.

    Args:
      arrays: the structure that was passed to `token_checksums`, in the order of the documents.
      checksums: of these batch rows.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents: of the step, in any order.
      mesh, batch_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
    Returns:
      True. Use it in a result of the step, or JAX removes the check: `jnp.where(is_right, loss,
      jnp.nan)`. False for other arrays if nothing raises an error: with `implementation="xla"`.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, on all ranks: an array is in another order, or of
        another batch.
    """
    options = read_options(_OP, axis_name, mesh, implementation, deadline)
    leaves = _read(_OP, arrays, documents)
    if checksums.shape[1] != len(leaves):
        raise ValueError(
            f"{_OP}: checksums are of {checksums.shape[1]} arrays but got {len(leaves)}. Pass "
            "token_checksums of the same arrays."
        )
    tokens = leaves, documents.segment_ids, documents.positions
    axes = find_axes(options, *leaves, batch_axis=batch_axis, head_axis=())
    order = trusted(order=documents.order, columns=documents.columns)
    _, missing, _ = fit_documents(_OP, order, axes, leaves[0].shape[:2])
    if not axes.sequence:
        return _on_rank(options, options.axis_names, tokens, checksums)
    # All groups fail together: else some would wait for others, in sums of gradients.
    options = dataclasses.replace(options, axis_names=(*axes.batch, *axes.sequence))
    return on_all_ranks(
        partial(_on_rank, options, axes.sequence),
        (pad_tokens(tokens, missing), checksums),
        axes=axes,
        in_specs=(axes.rows, P(axes.batch)),
        out_specs=P(),
        num_differentiable=0,
    )


@jax.named_scope("cpd.check_tokens")
def _on_rank(
    options: CollectiveOptions,
    sequence: tuple[str, ...],
    tokens: tuple[list[Any], Any, Any],
    checksums: UInt32[HostOrDevice, "B arrays 2"],
) -> Bool[Array, ""]:
    """Compares the sums of all ranks of `options`; those of `sequence` share batch rows."""
    names, num_ranks = options.axis_names, jax.lax.axis_size(options.axis_name)
    seen = jnp.asarray(_sums(tokens)).sum(0, dtype=jnp.uint32)
    expected = jnp.asarray(checksums).sum(0, dtype=jnp.uint32)
    expected = jnp.where(jax.lax.axis_index(sequence) == 0, expected, 0)
    (own,) = vary_alike([(seen - expected).view(jnp.int32).reshape(1, -1)], also=names)
    sums = gather_sequence(options, own, num_ranks).reshape(num_ranks, -1, 2)
    order_differs, values_differ = (sums.sum(0) != 0).T
    is_wrong = order_differs | values_differ
    number = is_wrong.argmax()
    kind = WRONG_TOKENS - 2 * number - values_differ[number]
    fault = jnp.where(is_wrong.any(), kind, 0).astype(jnp.int32)
    rank = jax.lax.axis_index(options.axis_name)
    is_right = (fault == 0) & confirmed(options, order_fingerprint(fault, rank))
    return jax.lax.pmin(is_right.astype(jnp.int32), names) == 1


def _sums(tokens: tuple[list[Any], Any, Any]) -> UInt32[HostOrDevice, "B arrays 2"]:
    """Returns the sums of each batch row: with ids and positions, and of the values alone.

    `tokens`: arrays `[B, T, ...]`, and the segment ids and positions of their tokens, `[B, T]`.
    Each array's first sum is of its values and those of all arrays before, token by token.
    """
    xp: Any = np if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tokens)) else jnp
    leaves, ids, positions = tokens
    is_token = ids > 0
    hashed = mix(_words(ids) * _FACTOR + mix(_words(positions) + np.uint32(1)))
    sums = []
    for x in leaves:
        words = _words(x).reshape(*x.shape[:2], math.prod(x.shape[2:]))
        feature = np.arange(words.shape[2], dtype=np.uint32) * np.uint32(2) + np.uint32(1)
        value = mix((mix(words) * feature).sum(2, dtype=np.uint32))
        hashed = mix(hashed * _FACTOR + value)
        sums.append([xp.where(is_token, hashed, np.uint32(0)), value])
    sums = [xp.stack([x.sum(1, dtype=np.uint32) for x in both], 1) for both in sums]
    return xp.stack(sums, 1)


def _words(x: Any) -> Any:
    """Returns 32 bits of each value, the same of NumPy and of what JAX makes of it; 0 of 0."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.float32).view(np.int32)
    return x.astype(np.uint32)


def _read(op: str, arrays: Any, documents: Any) -> list[Any]:
    check_type(op, "documents", documents, Documents, "Pass Documents(segment_ids, positions).")
    leaves, shape = jax.tree.leaves(arrays), documents.segment_ids.shape
    for number, x in enumerate(leaves):
        if x.shape[:2] != shape or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ValueError(
                f"{op}: array {number} is {x.dtype}{list(x.shape)}; it needs integers or floats "
                f"that start with {list(shape)}, the shape of the documents."
            )
    return leaves
