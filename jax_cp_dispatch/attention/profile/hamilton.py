"""Profiles Hamilton attention: runs and times each step on every rank."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Float

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms import Call, Hamilton, refuse
from jax_cp_dispatch.attention.local.blockwise import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import check_softmax
from jax_cp_dispatch.attention.local.ranges import KeyQueries
from jax_cp_dispatch.attention.operands import AttentionOptions, Operands, check_rows
from jax_cp_dispatch.attention.profile.step_record import AttentionProfile, StepRecord
from jax_cp_dispatch.attention.profile.stopwatch import check_tokens, stopwatch_over
from jax_cp_dispatch.attention.rotating import (
    ShardedSequence,
    TokenRanges,
    attend_sequence,
    from_layout,
    to_layout,
    token_ranges,
)
from jax_cp_dispatch.cycles import CycleRows
from jax_cp_dispatch.documents.documents import GivenDocuments, read_given, read_sequences
from jax_cp_dispatch.documents.layouts import PackedMask
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.timeline import COMMUNICATION, COMPUTATION


@door("hamilton_attention_profile")
def hamilton_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    mesh: Mesh,
    axis_name: str,
    nodes: int | None = None,
    cycles: CycleRows | str | None = None,
    maps: tuple[CycleRows, CycleRows] | None = None,
    repeats: int = 3,
    **options: Any,
) -> AttentionProfile:
    """Times Hamilton attention, forward, as one program and step by step.

    Call outside `jit` and `jax.shard_map`, in a process that owns all devices of the mesh. Each
    step runs separately, with synchronisation before and after it. For other algorithms, use
    `jax.profiler`: their operations have the scopes `cpd.attention` and `cpd.exchange`.

    Args:
      q, k, v: global arrays; `axis_name` has n devices, and n divides T.
      mesh: the mesh with `axis_name`; the arrays are replicated over its other axes.
      axis_name: the mesh axis of the ranks.
      nodes, cycles, maps: see `Hamilton`.
      repeats: runs of every program; medians are returned.
      options: `mask`, `documents`, `segment_ids`, `positions`, `scale`, `logit_soft_cap` and those
        of the exchange, as in `context_parallel_attention`, on global arrays.
    Returns:
      The times, and the output in the layout of q.
    Raises:
      TypeError, ValueError: as `context_parallel_attention`.
    """
    op = "hamilton_attention_profile"
    stopwatch = stopwatch_over(op, mesh, axis_name, repeats)
    num_ranks, algorithm = stopwatch.num_ranks, Hamilton(nodes, cycles, maps)
    algorithm.schedule(op, num_ranks)  # raises before the arrays are read
    given, read = _read_keywords(op, axis_name, options)
    refuse(op, algorithm, Call(read, (num_ranks,), q.shape[2]))
    mask, *documents = given.packed
    check_rows(op, Operands(q, k, v), *documents)
    check_tokens(op, q.shape[1], stopwatch)
    given.check_ranks(op, q.shape[1], num_ranks, f"{axis_name!r} has {num_ranks} devices")
    mask = read_mask_on_host(op, mask, q.shape[:2])
    sequence = algorithm.sequence(read, mask, num_ranks)
    documents = read_sequences(op, *documents, layout=read.order.layout, num_ranks=num_ranks)
    sharding = NamedSharding(stopwatch.mesh, P(None, axis_name))
    *qkv, packed = jax.device_put((q, k, v, PackedMask(mask, *documents)), sharding)
    attend = lambda q, k, v, packed: attend_sequence(sequence, Operands(q, k, v), packed).out
    whole = stopwatch.program(attend, 4 * [_ROWS], _ROWS)
    seconds, _ = stopwatch.run(whole, *qkv, packed)
    record = StepRecord(stopwatch)
    out = _run_steps(sequence, record, qkv, packed)
    return AttentionProfile(max(seconds), tuple(record.steps), tuple(record.spans), out)


def _read_keywords(
    op: str, axis_name: str, given: dict[str, Any]
) -> tuple[GivenDocuments, AttentionOptions]:
    """Returns the documents, with their mask, and the options."""
    exchange = {"implementation", "deadline", "num_comm_sm"}
    documents = ("documents", "segment_ids", "positions", "mask")
    names = {"scale", "logit_soft_cap"}
    if unknown := given.keys() - names - exchange - {*documents}:
        raise TypeError(
            f"{op}: got {', '.join(sorted(unknown))}; it takes the keywords of attention."
        )
    others = {name: given[name] for name in names & given.keys()}
    check_softmax(op, given.get("scale"), given.get("logit_soft_cap"))
    of_exchange = read_options(op, axis_name, **{name: given.get(name) for name in exchange})
    found = read_given(op, *(given.get(name) for name in documents), follows_plan=False)
    return found, AttentionOptions(of_exchange, order=found.order, **others)


# Axes that the ranks share: of rows, of chunks, of other arrays; `None` if all have the same.
_ROWS, _CHUNKS, _BLOCKS, _SCALAR = (1, 1, 0, None)


def _range_axes(mask: Mask) -> Any:
    """Returns the axes of `token_ranges`; all ranks have the queries of every key."""
    queries: Any = (_ROWS, _SCALAR, _SCALAR)
    return TokenRanges(
        cast(Any, _ROWS),
        is_key=cast(Any, _ROWS if mask.has_arrays else None),
        queries=KeyQueries(*queries) if mask.has_query_ranges else None,
    )


def _run_steps(sequence: ShardedSequence, record: StepRecord, qkv, packed: PackedMask):
    """Runs the steps of `attend_sequence`, each kind as one program."""
    q, k, v = qkv
    num_tokens = q.shape[1] // sequence.num_ranks
    shape = q.shape[0], num_tokens
    rotation = sequence.rotation(
        *(jax.ShapeDtypeStruct((*shape, *x.shape[2:]), x.dtype) for x in (q, k, v))
    )
    program, run = record.stopwatch.program, record.stopwatch.run

    sees = _range_axes(packed.mask)
    ranges = program(
        lambda packed: token_ranges(sequence, rotation, packed, shape)._replace(fault=None),
        [_ROWS],
        sees,
    )
    _, of_queries = run(ranges, packed)
    place = program(
        lambda *arrays: to_layout(sequence, rotation, arrays), 3 * [_ROWS], 3 * (_ROWS,)
    )
    if sequence.rearranges:
        ((q, k, v),) = record.step("to zigzag", communication=(place, q, k, v))
    else:
        _, (q, k, v) = run(place, q, k, v)

    pair, softmax = 2 * (_CHUNKS,), OnlineSoftmax._make(3 * [_BLOCKS])
    begin = program(
        lambda q, k, v, ranges: rotation.begin(q, (k, v), ranges),
        [*3 * [_ROWS], sees],
        (_BLOCKS, pair, softmax),
    )
    _, (queries, own, seen) = run(begin, q, k, v, of_queries)
    fetch_keys = program(rotation.fetch_keys, [pair, pair, _SCALAR], pair)

    def attend_held(queries, ranges, held, seen, step):
        return rotation.attend(queries, ranges, held, seen, rotation.key_order(step), None)

    attend = program(attend_held, [_BLOCKS, sees, pair, softmax, _SCALAR], softmax)
    held = own
    for step in range(sequence.num_ranks):
        computing = {COMPUTATION: (attend, queries, of_queries, held, seen, np.int32(step))}
        if step < rotation.last_step:
            fetching = {COMMUNICATION: (fetch_keys, own, held, np.int32(step))}
            held, seen = record.step(f"step {step}", **fetching, **computing)
        else:
            (seen,) = record.step(f"step {step}", **computing)
    _, out = run(
        program(lambda seen: rotation.result(seen)[0].astype(q.dtype), [softmax], _ROWS), seen
    )
    finish = program(lambda out: from_layout(sequence, (out,), num_tokens)[0], [_ROWS], _ROWS)
    if not sequence.rearranges:
        return run(finish, out)[1]
    return record.step("from zigzag", communication=(finish, out))[0]
