"""Measures time, compile time and memory of the three planning functions together, C = 8.

For each W x S. The baseline computes the same plan in vectorised NumPy int64 (stable sort by
destination, segmented sums); the results are compared first.
"""

import time
import tracemalloc

import common
import jax
import numpy as np

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv
from jax_cp_dispatch.scenarios import QkvDispatchInputs, draw_qkv_dispatch

GRID = [(8, 16), (8, 64), (32, 16), (32, 64), (128, 16), (128, 64), (512, 16), (512, 64)]
DEGREE = 8


def plan_all(inputs: QkvDispatchInputs, num_slots: int, num_kv_slots: int):
    lengths, dispatch = inputs.seq_len, inputs.q_dispatch
    return (
        compute_metadata(lengths, dispatch, max_recv_seqs=num_slots),
        compute_metadata_kv(*inputs, max_recv_seqs=num_kv_slots),
        compute_attn_layout_seqlens(
            lengths, inputs.q_to_num_kv_token, dispatch, max_recv_seqs=num_slots
        ),
    )


def _before(dst: np.ndarray, weight: np.ndarray, world_size: int) -> np.ndarray:
    """Returns the sum of earlier weights with the same destination."""
    order = np.argsort(dst, kind="stable")
    total = np.cumsum(weight[order]) - weight[order]
    starts = np.searchsorted(dst[order], np.arange(-1, world_size))
    result = np.empty_like(total)
    result[order] = total - total[np.minimum(starts, len(dst) - 1)][dst[order] + 1]
    return result


def _counts(dst: np.ndarray, weight: np.ndarray, world_size: int) -> np.ndarray:
    source = np.repeat(np.arange(world_size), len(dst) // world_size)
    sent = dst >= 0
    counts = np.zeros((world_size, world_size), np.int64)
    np.add.at(counts, (dst[sent], source[sent]), weight[sent])
    return np.concatenate([counts, counts.sum(1, keepdims=True)], 1)


def _scatter(dst: np.ndarray, slot: np.ndarray, num_slots: int, values: np.ndarray, fill: int):
    world_size = values.shape[0]
    out = np.full((world_size, num_slots), fill, np.int64)
    out[dst[dst >= 0], slot[dst >= 0]] = values.ravel()[dst >= 0]
    return out


def numpy_plan_all(inputs: QkvDispatchInputs, num_slots: int, num_kv_slots: int):
    """Computes in NumPy the arrays of `plan_all` that are not inputs."""
    mapping, position, context, num_kv, kv_tokens, seq_len, _, dispatch = (
        np.asarray(x, np.int64) for x in inputs
    )
    world_size, num_shards = seq_len.shape
    rank = np.repeat(np.arange(world_size), num_shards).reshape(seq_len.shape)
    home = seq_len.cumsum(1) - seq_len
    dst = dispatch.ravel()
    offset = _before(dst, seq_len.ravel(), world_size)
    slot = _before(dst, np.ones_like(dst), world_size)
    query = [offset, _counts(dst, seq_len.ravel(), world_size)]
    for x, fill in ((rank, -1), (home, 0), (seq_len, 0)):
        query.append(_scatter(dst, slot, num_slots, x, fill))
    lengths = tuple(
        np.pad(_scatter(dst, slot, num_slots, x, 0).cumsum(1), ((0, 0), (1, 0)))
        for x in (seq_len, kv_tokens)
    )

    index = mapping[..., 0] * num_shards + mapping[..., 1]
    used = (mapping[..., 0] >= 0).ravel()
    first_row = _before(dst, kv_tokens.ravel(), world_size)
    first_slot = _before(dst, num_kv.ravel(), world_size)
    kv_dst = np.where(used, dst[index.ravel()], -1)
    kv_offset = np.where(used, first_row[index.ravel()] + np.repeat(context.ravel(), DEGREE), 0)
    kv_slot = np.where(used, first_slot[index.ravel()] + position.ravel(), 0)
    row = np.arange(DEGREE) * seq_len.sum(1)[:, None, None] + home[..., None]
    replicated = tuple(np.repeat(x[..., None], DEGREE, -1) for x in (rank, seq_len))
    kv = [kv_dst, kv_offset, _counts(kv_dst, replicated[1].ravel(), world_size)]
    for x, fill in ((replicated[0], -1), (row, 0), (replicated[1], 0)):
        kv.append(_scatter(kv_dst, kv_slot, num_kv_slots, x, fill))
    return query, kv, lengths


def check_equal(ours, numpy) -> None:
    (forward, reverse), (kv_forward, kv_reverse), lengths = ours
    query, kv, numpy_lengths = numpy
    sent = np.asarray(forward.dst_rank).ravel() >= 0
    np.testing.assert_array_equal(np.asarray(forward.dst_offset).ravel()[sent], query[0][sent])
    kv_sent = kv[0] >= 0
    np.testing.assert_array_equal(
        np.asarray(kv_forward.dst_offset).ravel()[kv_sent], kv[1][kv_sent]
    )
    pairs = [(kv_forward.dst_rank.ravel(), kv[0])]
    for plan, back, arrays in ((forward, reverse, query[1:]), (kv_forward, kv_reverse, kv[2:])):
        ours = (plan.num_recv_tokens, back.dst_rank, back.dst_offset, back.seq_len)
        pairs += zip(ours, arrays, strict=True)
    pairs += zip((lengths.cu_seqlens_q, lengths.cu_seqlens_kv), numpy_lengths, strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(np.asarray(x), y)


def measure(world_size: int, num_shards: int, repeats: int) -> dict:
    num_docs = num_shards // DEGREE
    drawn = draw_qkv_dispatch(jax.random.key(1), world_size, num_shards * 64, num_docs, DEGREE)
    sent = drawn.q_dispatch >= 0
    slots = tuple(
        int(np.bincount(drawn.q_dispatch[sent], weights=x[sent], minlength=world_size).max())
        for x in (np.ones_like(drawn.seq_len), drawn.q_to_num_kv_seq)
    )
    inputs = jax.tree.map(jax.numpy.asarray, drawn)
    function = jax.jit(lambda x: plan_all(x, *slots))
    start = time.perf_counter()
    memory = function.lower(inputs).compile().memory_analysis()
    compile_s = time.perf_counter() - start
    assert memory is not None
    check_equal(function(inputs), numpy_plan_all(drawn, *slots))

    tracemalloc.start()
    numpy_plan_all(drawn, *slots)
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    seconds = common.interleaved(
        {
            "ours": lambda: function(inputs),
            "numpy": lambda: numpy_plan_all(drawn, *slots),
        },
        repeats,
    )
    return {
        "world_size": world_size,
        "num_shards": num_shards,
        "num_replicas": DEGREE,
        "ms": round(1e3 * seconds["ours"], 3),
        "compile_s": round(compile_s, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "numpy_ms": round(1e3 * seconds["numpy"], 3),
        "numpy_peak_bytes": numpy_peak,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--max-ranks", type=int, default=512)
    arguments = common.options(parser, max_ranks=8)
    rows = []
    print("  W x S    ours ms  compile s  temp MB  out MB | NumPy ms  peak MB")
    for world_size, num_shards in GRID:
        if world_size > arguments.max_ranks:
            continue
        row = measure(world_size, num_shards, arguments.repeats)
        rows.append(row)
        print(
            f"{world_size:4d} x {num_shards:2d}  {row['ms']:8.2f}  {row['compile_s']:9.2f}"
            f"  {row['temp_bytes'] / 1e6:7.1f}  {row['output_bytes'] / 1e6:6.1f}"
            f" | {row['numpy_ms']:8.2f}  {row['numpy_peak_bytes'] / 1e6:7.1f}",
            flush=True,
        )
    common.write(arguments.output, "the three planning functions together", rows)


if __name__ == "__main__":
    main()
