"""Custom calls as a user may write them, each with one error; see handmade_gemms for GEMMs.

As a program, `python handmade_calls.py FIRST` makes the calls of all targets from number FIRST, on
one device, and prints the outcome of each as a JSON line. A call that kills the process has none.
"""

import dataclasses
import importlib
import json
import sys
from typing import Any

import numpy as np

TARGETS = ("dispatch", "combine", "gemm")
NUM_TOKENS, CAPACITY, NUM_SLOTS, WIDTH = 4, 5, 2, 3
HUGE = 2**62


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one rank; results are given as (dtype, shape)."""

    attributes: dict[str, Any]
    metadata: list[np.ndarray]
    arrays: list[np.ndarray]
    results: list[tuple[Any, tuple[int, ...]]]

    def with_attributes(self, **attributes) -> "Call":
        return dataclasses.replace(self, attributes={**self.attributes, **attributes})

    def with_metadata(self, index, field) -> "Call":
        fields = [*self.metadata[:index], field, *self.metadata[index + 1 :]]
        return dataclasses.replace(self, metadata=fields)

    def with_arrays(self, arrays=None, results=None) -> "Call":
        return dataclasses.replace(
            self,
            arrays=self.arrays if arrays is None else arrays,
            results=self.results if results is None else results,
        )


def int64(*values) -> np.ndarray:
    return np.array(values, np.int64)


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def array_of(dtype, values) -> np.ndarray:
    return np.array(values, dtype)


def array(target) -> np.ndarray:
    """Returns different small integers, with as many rows as the operand of `target`."""
    num_rows = NUM_TOKENS if target == "dispatch" else CAPACITY
    return np.arange(1, 1 + num_rows * WIDTH, dtype=np.float32).reshape(num_rows, WIDTH)


def right_call(target) -> Call:
    """Three rows from row 0 to row 1, then one from row 3 to row 0: a rank sends to itself."""
    if target == "gemm":
        return handmade_gemms().right_gemm()
    num_rows = CAPACITY if target == "dispatch" else NUM_TOKENS
    return Call(
        attributes={
            "op": target,
            "axis": "cp",
            "transport": "in_process",
            "signature": "",
            "processes": int64(),
            "num_ranks": np.int64(1),
            "deadline_ms": np.int64(1000),
            "capacity_names": "capacity",
            "has_src_offset": int64(0),
            "has_weights": int64(0),
            "has_fingerprint": int64(0),
            "num_arrays": int64(1),
            "num_tokens": int64(NUM_TOKENS),
            "capacity": int64(CAPACITY),
            "buffer": int64(0),
        },
        metadata=[int32(4, 4), int32(3, 1), int32(0, 0), int32(1, 0)],
        arrays=[array(target)],
        results=[(np.float32, (num_rows, WIDTH))],
    )


def handmade_gemms():
    return importlib.import_module("handmade_gemms")  # which builds on this module


def right_result(target) -> np.ndarray:
    if target == "gemm":
        return handmade_gemms().right_product()
    x = array(target)
    if target == "dispatch":
        return np.stack([x[3], x[0], x[1], x[2], np.zeros(WIDTH, np.float32)])
    return np.stack([x[1], x[2], x[3], x[0]])


def wrong_calls(target) -> dict[str, tuple[Call, str]]:
    """Returns by name the call and its expected error."""
    call = right_call(target)
    if target == "gemm":
        return handmade_gemms().wrong_gemms()
    x = array(target)
    rows_out = call.results[0][1][0]
    counts = "num_recv_tokens of plan 0"
    # Attributes and operands, named as in the handlers.
    by_attributes = {
        "no ranks": ({"num_ranks": np.int64(0)}, "num_ranks is 0"),
        "more ranks than an int": ({"num_ranks": np.int64(2**32 + 1)}, "num_ranks is 4294967297"),
        "many ranks": ({"num_ranks": np.int64(2**31 - 2)}, f"{counts} has shape [2]"),
        "no deadline": ({"deadline_ms": np.int64(0)}, "deadline_ms is 0"),
        "an endless deadline": ({"deadline_ms": np.int64(HUGE)}, f"deadline_ms is {HUGE}"),
        "no arrays": ({"num_arrays": int64(0)}, "num_arrays is 0"),
        "an array too many": ({"num_arrays": int64(2)}, "there are 5 operands and 1 results"),
        "many arrays": ({"num_arrays": int64(HUGE)}, f"num_arrays is {HUGE}"),
        "no weights": ({"has_weights": int64(1)}, "there are 5 operands"),
        "no fingerprint": ({"has_fingerprint": int64(1)}, "there are 5 operands"),
        "too many tokens": ({"num_tokens": int64(NUM_TOKENS + 1)}, "the attributes say"),
        "too much capacity": ({"capacity": int64(CAPACITY + 1)}, "the attributes say"),
        "negative tokens": ({"num_tokens": int64(-1)}, "plan 0 is for -1 rows"),
        "huge tokens": ({"num_tokens": int64(HUGE)}, f"plan 0 is for {HUGE} rows"),
        "no such buffer": ({"buffer": int64(HUGE)}, f"there is no buffer {HUGE}"),
        "a negative buffer": ({"buffer": int64(-7)}, "there is no buffer -7"),
    }
    of_groups = ("num_arrays", "num_tokens", "capacity", "buffer")
    lists = ("has_src_offset", "has_weights", "has_fingerprint", *of_groups)
    for name in lists:
        by_attributes |= {
            f"{name} is empty": ({name: int64()}, "entries"),
            f"{name} is no list": ({name: np.int64(1)}, f"{name} is missing or has another type"),
        }
    by_attributes["all are empty"] = ({name: int64() for name in lists}, "0 entries")
    by_attributes["an attribute too many"] = ({"depth": np.int64(1)}, "16 were given instead of 15")
    by_attributes["no such transport"] = ({"transport": "pigeon"}, "there is no transport 'pigeon'")
    by_attributes["num_ranks is a float"] = ({"num_ranks": np.float64(1)}, "")

    by_metadata = {
        "num_recv_tokens is a scalar": (0, np.int32(4), "num_recv_tokens of plan 0 has shape []"),
        "num_recv_tokens is shorter": (0, int32(4), "num_recv_tokens of plan 0 has shape [1]"),
        "num_recv_tokens is of floats": (
            0,
            array_of(np.float32, [4, 4]),
            "num_recv_tokens of plan 0 has no integers",
        ),
        "num_recv_tokens has more views": (
            0,
            array_of(np.int32, [[4, 4]] * 2),
            "num_recv_tokens of plan 0 has shape [2, 2",
        ),
        "num_recv_tokens alone has views": (
            0,
            array_of(np.int32, [[4, 4]]),
            "seq_len of plan 0 has shape [2]",
        ),
        "seq_len is a scalar": (1, np.int32(4), "seq_len of plan 0 has shape []"),
        "seq_len is shorter": (1, int32(3), "dst_rank and dst_offset of plan 0 have shapes [2]"),
        "seq_len has more dimensions": (
            1,
            array_of(np.int32, [[3, 1]]),
            "seq_len of plan 0 has shape [1, 2]",
        ),
        "dst_rank is a scalar": (2, np.int32(0), "dst_rank of plan 0 has shape []"),
        "dst_rank has replicas": (2, array_of(np.int32, [[0], [0]]), "have shapes [2, 1] and [2]"),
        "dst_rank has more": (
            2,
            array_of(np.int32, [[[0], [0]]]),
            "dst_rank of plan 0 has shape [1, 2, 1]",
        ),
        "dst_offset is longer": (3, int32(1, 0, 0), "have shapes [2] and [3]"),
        "dst_offset is of floats": (
            3,
            array_of(np.float64, [1, 0]),
            "dst_offset of plan 0 has no integers",
        ),
        "a rank that is none": (2, int32(1, 0), "has dst_rank 1"),
        "a huge rank": (2, int64(HUGE, 0), f"has dst_rank {HUGE}"),
        "a huge row": (3, int64(HUGE, 0), f"has dst_offset {HUGE}"),
        "a huge length": (1, int64(HUGE, 1), f"names {HUGE} rows"),
    }

    def of(dtype, *shape):
        return [(dtype, shape)]

    f32 = np.float32
    by_arrays = {
        "a scalar": ([f32(1)], None, "array 0 of plan 0 is a scalar"),
        "a scalar result": (None, of(f32), "array 0 of plan 0 is a scalar"),
        "wider rows": ([np.tile(x, (1, 2))], None, "has rows of shape [6] but its result of [3]"),
        "a wider result": (None, of(f32, rows_out, 300), "but its result of [300"),
        "a result of more dimensions": (None, of(f32, rows_out, 3, 1), "its result of [3, 1]"),
        "fewer rows": ([x[:-1]], None, "the attributes say"),
        "a longer result": (None, of(f32, rows_out + 1000, WIDTH), "the attributes say"),
        "float64 into float32": ([x.astype(np.float64)], None, "types"),
        "complex into float32": ([x.astype(np.complex64)], None, "types"),
        "float32 into complex": (None, of(np.complex64, rows_out, WIDTH), "types"),
        "an operand too many": ([x] * 3, None, "there are 7 operands and 1 results"),
        "a result too many": (None, call.results * 2, "there are 5 operands and 2 results"),
        "no operand": ([], None, "there are 4 operands and 1 results"),
    }  # fmt: skip
    if target == "combine":
        by_arrays["sums of truths"] = (
            [x != 0], of(np.bool_, rows_out, WIDTH), "has types that cannot be summed"
        )  # fmt: skip
        by_arrays["storage"] = ([x, x], None, "there are 6 operands and 1 results")
    wrong = {name: (call.with_attributes(**a), text) for name, (a, text) in by_attributes.items()}
    wrong |= {name: (call.with_metadata(i, m), text) for name, (i, m, text) in by_metadata.items()}
    wrong |= {name: (call.with_arrays(a, r), text) for name, (a, r, text) in by_arrays.items()}

    for name, fingerprint, text in (
        ("a fingerprint is shorter", int32(1, 1, 1), "fingerprint of plan 0 has shape [3]"),
        (
            "a fingerprint is of floats",
            array_of(np.float32, [0] * 9),
            "fingerprint of plan 0 has no integers",
        ),
        ("another batch", int32(1, 0, 0, 2, 2, 3, 3, 0, 4), "the plan was made for another batch"),
        (
            "the part of another rank",
            int32(1, 3, 0, 2, 2, 3, 3, 0, 0),
            "the part of rank 3, on rank 0",
        ),
    ):
        fingerprinted = dataclasses.replace(call, metadata=[*call.metadata, fingerprint])
        wrong[name] = fingerprinted.with_attributes(has_fingerprint=int64(1)), text

    sources = dataclasses.replace(call, metadata=[*call.metadata, int32(0, 3)])
    sources = sources.with_attributes(has_src_offset=int64(1))
    for name, field, text in (
        ("src_offset is shorter", int32(0), "src_offset of plan 0 has shape [1] but seq_len [2]"),
        (
            "src_offset is of floats",
            array_of(np.float32, [0, 3]),
            "src_offset of plan 0 has no integers",
        ),
        ("a huge source", int64(HUGE, 0), "names 3 rows from row"),
    ):
        wrong[name] = sources.with_metadata(4, field), text
    weights = dataclasses.replace(call, metadata=[*call.metadata, int32(0, 0)])
    text = "weights of plan 0 are not those"
    wrong["weights are integers"] = weights.with_attributes(has_weights=int64(1)), text
    # A second plan that the attributes do not count, and one that exists only in them.
    wrong["a plan too many"] = (
        dataclasses.replace(call, metadata=call.metadata * 2),
        "there are 9 operands and 1 results",
    )
    wrong["a plan too few"] = (
        call.with_attributes(**{name: np.tile(call.attributes[name], 2) for name in lists}),
        "there are 5 operands and 1 results",
    )
    return wrong


def run(target, call) -> np.ndarray:
    import jax

    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in call.results]
    made = jax.ffi.ffi_call(f"jax_cp_dispatch.{target}", results)
    place = np.int32(0)
    operands = [place, place, *call.metadata, *call.arrays]
    return np.asarray(jax.jit(lambda *x: made(*x, **call.attributes))(*operands)[0])


def all_calls() -> list[tuple[str, str]]:
    """Returns (target, name) of every call; the valid one of a target is named "right"."""
    return [(target, name) for target in TARGETS for name in ("right", *wrong_calls(target))]


def main(first) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    from jax_cp_dispatch.comm_gemm.engine.custom_call import (
        load_blas,  # the package registers the targets
    )

    load_blas()

    wrong = {target: wrong_calls(target) for target in TARGETS}
    for target, name in all_calls()[first:]:
        call = right_call(target) if name == "right" else wrong[target][name][0]
        try:
            outcome = {"result": run(target, call).tolist()}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
