"""Custom calls of a GEMM as a user may write them, each with one error; see handmade_calls."""

import dataclasses

import numpy as np
from handmade_calls import HUGE, Call, int64

M, K, N = 4, 3, 5
X = np.arange(M * K, dtype=np.float32).reshape(M, K)
W = np.arange(K * N, dtype=np.float32).reshape(K, N) - 7


def right_gemm() -> Call:
    """A reduce-scatter of one rank: a product and its sum over this rank."""
    numbers = {
        **{"num_ranks": 1, "deadline_ms": 1000, "num_threads": 1, "scaling_mode": 0},
        **{"comm_overlap_method": 0, "comm_type": 1, "comm_overlap_id": 0, "num_splits": 4},
        **{"lhs_axis_boundary": 1, "rhs_axis_boundary": 1, "aux_axis_boundary": 1},
        "num_batches": 1,
    }
    flags = (
        *("atomic", "overlap_first_gemm", "aggregate", "copies", "lhs_transposed"),
        *("rhs_transposed", "fuse_bias", "fuse_gelu", "grad"),
        *("in_ring_order", "gathers_to_aux"),
    )
    none, f32 = np.zeros(1, np.float32), np.float32
    return Call(
        attributes={
            **{name: np.int64(number) for name, number in numbers.items()},
            **dict.fromkeys(flags, False),
            **{"op": "gemm", "axis": "tp", "transport": "in_process"},
            **{"signature": "", "processes": int64()},
            "row_counts": int64(M),
        },
        metadata=[],
        arrays=[X, none, W, none, none, none, none],
        results=[(f32, (M, N)), *[(f32, (1,))] * 5, (f32, (M, N))],
    )


def right_product() -> np.ndarray:
    return X @ W


def wrong_gemms() -> dict[str, tuple[Call, str]]:
    """Returns by name the call and its expected error."""
    call = right_gemm()
    by_attributes = {
        "no ranks": ("num_ranks", 0, "row_counts needs one count per rank"),
        "many ranks": ("num_ranks", HUGE, "row_counts needs one count per rank"),
        "no deadline": ("deadline_ms", 0, "deadline_ms is out of range"),
        "an endless deadline": ("deadline_ms", HUGE, "deadline_ms is out of range"),
        "no threads": ("num_threads", 0, "num_threads is out of range"),
        "many threads": ("num_threads", HUGE, "num_threads is out of range"),
        "many chunks": ("num_splits", HUGE, "num_splits and num_batches need"),
        "many batches": ("num_batches", HUGE, "num_splits and num_batches need"),
        "no such type": ("comm_type", 3, "is out of range"),
        "no such method": ("comm_overlap_method", -1, "is out of range"),
        "no such scaling": ("scaling_mode", HUGE, "is out of range"),
        "no such buffer": ("comm_overlap_id", HUGE, f"there is no buffer {HUGE}"),
    }
    wrong = {
        name: (call.with_attributes(**{attribute: np.int64(value)}), text)
        for name, (attribute, value, text) in by_attributes.items()
    }
    for name, counts in (
        ("counts that are negative", int64(-1)),
        ("counts that are huge", int64(HUGE)),
        ("counts of other rows", int64(M - 1)),
        ("no counts", int64()),
    ):
        wrong[name] = call.with_attributes(row_counts=counts), "gemm over axis 'tp': "

    def with_array(index, array):
        arrays = [*call.arrays[:index], array, *call.arrays[index + 1 :]]
        return dataclasses.replace(call, arrays=arrays)

    def with_result(index, dtype, *shape):
        results = [*call.results[:index], (dtype, shape), *call.results[index + 1 :]]
        return dataclasses.replace(call, results=results)

    types = "the element types of operands or output are not supported"
    return {
        **wrong,
        "a complex operand": (with_array(0, X.astype(np.complex64)), types),
        "a complex result": (with_result(0, np.complex64, M, N), types),
        "an operand of integers": (with_array(2, W.astype(np.int8)), types),
        "a wider operand": (with_array(0, np.tile(X, (1, 2))), "the same contracted size"),
        "a longer operand": (with_array(0, np.tile(X, (2, 1))), "row counts do not fit the arrays"),
        "a shorter result": (with_result(0, np.float32, M - 1, N), "row counts do not fit"),
        "a narrower result": (with_result(0, np.float32, M, N - 1), "row counts do not fit"),
        "a smaller workspace": (with_result(6, np.float32, M, N - 1), "the workspace has"),
        "a workspace of integers": (with_result(6, np.int32, M, N), "the type of partial sums"),
    }
