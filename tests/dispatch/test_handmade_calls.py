"""Custom calls written by hand, each with one error: the handler raises it, the process survives.

Only the handlers stand between such a call and memory that is not its own, and the fuzzers
(tests/native/fuzz.sh) run by hand. Python's checks, which come first, cannot reach these.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jax_cp_dispatch import gemm

HUGE = 2**62
F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one rank; results are given as (dtype, shape)."""

    target: str
    attributes: dict[str, Any]
    operands: list[Any]
    results: list[Any]

    def change(self, operands=None, results=None, **attributes) -> "Call":
        """Returns the call with other attributes, and operands and results by number."""
        lists = []
        for before, changed in (self.operands, operands), (self.results, results):
            places = range(max([len(before), *(i + 1 for i in changed or {})]))
            lists.append([(changed or {}).get(i, before[min(i, len(before) - 1)]) for i in places])
        return dataclasses.replace(
            self, attributes={**self.attributes, **attributes}, operands=lists[0], results=lists[1]
        )

    def __call__(self) -> np.ndarray:
        results = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in self.results]
        made = jax.ffi.ffi_call(f"jax_cp_dispatch.{self.target}", results)
        place = np.int32(0)
        with jax.enable_x64(True):
            run = jax.jit(lambda *x: made(*x, **self.attributes))
            return np.asarray(run(place, place, *self.operands)[0])


int32 = lambda *values: np.array(values, np.int32)
int64 = lambda *values: np.array(values, np.int64)


# ---- An exchange: three rows from row 0 to row 1, then one from row 3 to row 0, of one rank.

NUM_TOKENS, CAPACITY = 4, 5
X = np.arange(1, 1 + NUM_TOKENS * 3, dtype=F32).reshape(NUM_TOKENS, 3)
ALL, LENGTH, RANK, OFFSET, ROWS = range(5)  # operands; a further one is at 5
DISPATCH = Call(
    "dispatch",
    {
        **{"op": "dispatch", "axis": "cp", "transport": "in_process", "signature": ""},
        **{"processes": int64(), "num_ranks": np.int64(1), "deadline_ms": np.int64(1000)},
        "capacity_names": "capacity",
        **dict.fromkeys(("has_src_offset", "has_weights", "has_fingerprint"), int64(0)),
        **{"num_arrays": int64(1), "num_tokens": int64(NUM_TOKENS)},
        **{"capacity": int64(CAPACITY), "buffer": int64(0)},
    },
    [int32(4, 4), int32(3, 1), int32(0, 0), int32(1, 0), X],
    [(F32, (CAPACITY, 3))],
)


def with_field(name, field) -> Call:
    """The call with a further field of its plan, before its rows."""
    call = DISPATCH.change({ROWS: field, ROWS + 1: X})
    return call.change(**{f"has_{name}": int64(1)})


dispatch_with = DISPATCH.change
WRONG_EXCHANGES = {
    "no ranks": (dispatch_with(num_ranks=np.int64(0)), "num_ranks is 0"),
    "many ranks": (dispatch_with(num_ranks=np.int64(2**32 + 1)), "num_ranks is 4294967297"),
    "no deadline": (dispatch_with(deadline_ms=np.int64(0)), "deadline_ms is 0"),
    "an endless deadline": (dispatch_with(deadline_ms=np.int64(HUGE)), f"deadline_ms is {HUGE}"),
    "many arrays": (dispatch_with(num_arrays=int64(HUGE)), f"num_arrays is {HUGE}"),
    "an array too many": (dispatch_with(num_arrays=int64(2)), "there are 5 operands and 1 results"),
    "too many tokens": (dispatch_with(num_tokens=int64(5)), "the attributes say"),
    "negative tokens": (dispatch_with(num_tokens=int64(-1)), "plan 0 is for -1 rows"),
    "too much capacity": (dispatch_with(capacity=int64(6)), "the attributes say"),
    "no such buffer": (dispatch_with(buffer=int64(-7)), "there is no buffer -7"),
    "an empty list": (dispatch_with(capacity=int64()), "entries"),
    "no list": (dispatch_with(num_tokens=np.int64(1)), "num_tokens is missing or has another type"),
    "no such transport": (dispatch_with(transport="pigeon"), "there is no transport 'pigeon'"),
    "short counts": (DISPATCH.change({ALL: int32(4)}), "metadata of plan 0"),
    "long lengths": (DISPATCH.change({LENGTH: int32(3, 1, 0)}), "metadata of plan 0"),
    "a huge length": (DISPATCH.change({LENGTH: int64(HUGE, 1)}), f"names {HUGE} rows"),
    "a huge rank": (DISPATCH.change({RANK: int64(HUGE, 0)}), f"has dst_rank {HUGE}"),
    "long offsets": (DISPATCH.change({OFFSET: int32(1, 0, 0)}), "metadata of plan 0"),
    "a huge offset": (DISPATCH.change({OFFSET: int64(HUGE, 0)}), f"has dst_offset {HUGE}"),
    "float offsets": (DISPATCH.change({OFFSET: np.ones(2, F32)}), "metadata of plan 0"),
    "a scalar": (DISPATCH.change({ROWS: F32(1)}), "array 0 of plan 0 is a scalar"),
    "fewer rows": (DISPATCH.change({ROWS: X[:-1]}), "the attributes say"),
    "wider rows": (DISPATCH.change({ROWS: np.tile(X, (1, 2))}), "different types or shapes"),
    "wider results": (
        DISPATCH.change(results={0: (F32, (CAPACITY, 300))}),
        "different types or shapes",
    ),
    "longer results": (DISPATCH.change(results={0: (F32, (1005, 3))}), "the attributes say"),
    "wider types": (DISPATCH.change({ROWS: X.astype(np.float64)}), "types"),
    "short sources": (with_field("src_offset", int32(0)), "metadata of plan 0"),
    "a huge source": (with_field("src_offset", int64(HUGE, 0)), "names 3 rows from row"),
    "short fingerprints": (with_field("fingerprint", int32(1, 1, 1)), "fingerprint of plan 0"),
    "integer weights": (with_field("weights", int32(0, 0)), "metadata of plan 0"),
}

# ---- A GEMM: a reduce-scatter of one rank, a product and its sum over this rank.

M, K, N = 4, 3, 5
LHS = np.arange(M * K, dtype=F32).reshape(M, K)
RHS = np.arange(K * N, dtype=F32).reshape(K, N) - 7
NONE = np.zeros(1, F32)
NUMBERS = {
    **{"num_ranks": 1, "deadline_ms": 1000, "num_threads": 1, "scaling_mode": 0, "num_splits": 4},
    **{"comm_overlap_method": 0, "comm_type": 1, "comm_overlap_id": 0, "num_batches": 1},
    **{"lhs_axis_boundary": 1, "rhs_axis_boundary": 1, "aux_axis_boundary": 1},
}
FLAGS = (
    *("atomic", "overlap_first_gemm", "aggregate", "copies", "lhs_transposed", "rhs_transposed"),
    *("fuse_bias", "fuse_gelu", "grad", "in_ring_order", "gathers_to_aux"),
)
GEMM = Call(
    "gemm",
    {
        **{name: np.int64(number) for name, number in NUMBERS.items()},
        **dict.fromkeys(FLAGS, False),
        **{"op": "gemm", "axis": "tp", "transport": "in_process", "signature": ""},
        **{"processes": int64(), "row_counts": int64(M)},
    },
    [LHS, NONE, RHS, NONE, NONE, NONE, NONE],
    [(F32, (M, N)), *[(F32, (1,))] * 5, (F32, (M, N))],
)


def gemm_with(**numbers) -> Call:
    return GEMM.change(**{name: np.int64(number) for name, number in numbers.items()})


WRONG_GEMMS = {
    "no ranks": (gemm_with(num_ranks=0), "row_counts needs one count per rank"),
    "no deadline": (gemm_with(deadline_ms=0), "deadline_ms is out of range"),
    "many threads": (gemm_with(num_threads=HUGE), "num_threads is out of range"),
    "many chunks": (gemm_with(num_splits=HUGE), "num_splits and num_batches need"),
    "many batches": (gemm_with(num_batches=HUGE), "num_splits and num_batches need"),
    "no such method": (gemm_with(comm_overlap_method=-1), "is out of range"),
    "no such buffer": (gemm_with(comm_overlap_id=HUGE), f"there is no buffer {HUGE}"),
    "negative counts": (GEMM.change(row_counts=int64(-1)), "gemm over axis 'tp': "),
    "huge counts": (GEMM.change(row_counts=int64(HUGE)), "gemm over axis 'tp': "),
    "complex rows": (GEMM.change({0: LHS.astype(np.complex64)}), "are not supported"),
    "wider rows": (GEMM.change({0: np.tile(LHS, (1, 2))}), "the same contracted size"),
    "more rows": (GEMM.change({0: np.tile(LHS, (2, 1))}), "row counts do not fit the arrays"),
    "fewer results": (GEMM.change(results={0: (F32, (M - 1, N))}), "row counts do not fit"),
    "less workspace": (GEMM.change(results={6: (F32, (M, N - 1))}), "the workspace has"),
}
WRONG = [
    pytest.param(call, text, id=f"{call.target}-{name}")
    for wrong in (WRONG_EXCHANGES, WRONG_GEMMS)
    for name, (call, text) in wrong.items()
]


@pytest.fixture(autouse=True, scope="module")
def blas_is_loaded():
    """The first product of a process loads it."""
    jax.jit(gemm).lower(LHS, RHS)


def test_calls_without_an_error():
    """The control: calls below are rejected only for their one error."""
    sent = np.stack([X[3], X[0], X[1], X[2], np.zeros(3, F32)])
    np.testing.assert_array_equal(DISPATCH(), sent)
    sources = with_field("src_offset", int32(0, 3))
    np.testing.assert_array_equal(sources(), sent)
    np.testing.assert_array_equal(GEMM(), LHS @ RHS)


@pytest.mark.parametrize("call, text", WRONG)
def test_wrong_calls(call, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        call()
