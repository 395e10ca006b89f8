"""Invalid calls of layers beside attention: each is rejected before anything is compiled."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import check_names, check_rejected

from jax_cp_dispatch import Documents, place_tokens, sequence

pytestmark = pytest.mark.usefixtures("unchecked_types")

TOKENS = np.zeros((1, 16, 4), np.float32)
HEADS = np.zeros((1, 16, 2, 4), np.float32)
INTEGERS = np.zeros((1, 16, 4), np.int32)
GATES = np.zeros((1, 16, 2), np.float32)
IDS = np.ones((1, 16), np.int32)
KERNEL = SimpleNamespace(summary=len, apply=len, run=len)
OF_HEADS = permuted_mesh((1, 2), (AXIS, "tensor"))
DOCUMENTS = Documents(IDS)
OF_2, OF_3 = (place_tokens([[6 * n]], world_size=n).documents for n in (2, 3))


@dataclasses.dataclass(frozen=True)
class Returns:
    """A kernel whose outputs have this shape."""

    shape: tuple[int, ...]

    def summary(self, inputs: Any) -> Any:
        return inputs.sum((0, 1))

    def apply(self, map_: Any, state: Any) -> Any:
        return map_

    def run(self, inputs: Any, states: Any, piece_ids: Any) -> Any:
        return inputs.sum() + np.zeros(self.shape, np.float32)


def call(op: str, **given: Any):
    return getattr(sequence, op)(**{"axis_name": AXIS, "mesh": mesh_of(1), **given})


def shift(x: Any = TOKENS, **given: Any):
    return call("shift", x=x, **{"offset": 1, **given})


def conv(**given: Any):
    return call("causal_conv", **{"x": TOKENS, "weight": np.zeros((3, 4), np.float32), **given})


def delta(**given: Any):
    heads = {"q": HEADS, "k": HEADS, "v": HEADS, "log_decay": GATES, "beta": GATES}
    return call("gated_delta_rule", **{**heads, **given})


def recur(**given: Any):
    return call("recurrence", **{"inputs": TOKENS, "local": KERNEL, **given})


# Name, call, and the message after "<operation>: ".
CASES = [
    ("shift", lambda: shift(offset=1.5), "offset is 1.5; it needs to be an int"),
    ("shift", lambda: shift(INTEGERS, fill=0.5), r"fill is 0.5, but .* int32. Pass an integer in"),
    ("shift", lambda: shift(INTEGERS > 0, fill=2), r"fill is 2, but .* bool. Pass .* \[0, 1\]"),
    ("shift", lambda: shift(INTEGERS.astype(np.uint8), fill=-1), r"fill is -1, but .* \[0, 255\]"),
    (
        "shift_documents",
        lambda: sequence.shift_documents(INTEGERS, 1, segment_ids=IDS, fill=2**40),
        "fill is 1099511627776, but an array has dtype int32",
    ),
    ("shift", lambda: shift({}), "at least one such array"),
    ("shift", lambda: shift(documents="no"), "documents is of type str.* Pass Documents"),
    (
        "shift",
        lambda: shift(documents=DOCUMENTS, positions=IDS),
        "got documents, and segment_ids or positions, which they have. Omit the latter",
    ),
    (
        "shift",
        lambda: shift(documents=DOCUMENTS.zigzag(2), mesh=mesh_of(4)),
        r"the documents are in zigzag order of 2 ranks, but .* Pass documents.zigzag\(4\)",
    ),
    ("shift", lambda: shift(documents=OF_2), r"segment_ids has shape \(1, 12\)"),
    (
        "shift",
        lambda: shift(TOKENS[:, :12], documents=OF_2),
        "plan is for world_size=2 but .* Place the tokens again",
    ),
    (
        "shift",
        lambda: shift(TOKENS[:, :12], documents=OF_2, mesh=mesh_of(3)),
        "plan is for world_size=2 but .* Place the tokens again",
    ),
    ("shift", lambda: shift([TOKENS, 1]), "x is of type int; it needs to be an array"),
    (
        "shift",
        lambda: shift([HEADS, TOKENS[..., :3]], mesh=OF_HEADS, head_axis="tensor"),
        r"an array has shape \(1, 16, 3\) but head_axis .* has 2 devices.* Pass head_axis=\(\)",
    ),
    ("causal_conv", lambda: conv(weight=np.zeros((3, 5))), "weight for each tap"),
    ("causal_conv", lambda: conv(weight=np.zeros((0, 4))), "weight for each tap"),
    ("causal_conv", lambda: conv(bias=np.zeros(3)), "one value for each channel"),
    ("causal_conv", lambda: conv(segment_ids=IDS[:, :8]), "segment_ids has shape"),
    ("causal_conv", lambda: conv(segment_ids=IDS * 1.0), "needs to be integers"),
    ("causal_conv", lambda: conv(segment_ids=[[1] * 16]), "segment_ids is of type list"),
    ("causal_conv", lambda: conv(x=INTEGERS), "x has dtype int32; it needs to be floats"),
    ("gated_delta_rule", lambda: delta(q=TOKENS), "Pass heads as axis 2"),
    (
        "gated_delta_rule",
        lambda: delta(**dict.fromkeys("qk", np.zeros((1, 16, 3, 4), np.float32))),
        "v has 2 heads but k has 3, which must divide them",
    ),
    ("gated_delta_rule", lambda: delta(v=HEADS[:, :, :0]), "v has 0 heads but k has 2"),
    (
        "gated_delta_rule",
        lambda: delta(**dict.fromkeys("qk", HEADS[..., :0])),
        "heads of q and k have size 0; they need at least one feature",
    ),
    ("gated_delta_rule", lambda: delta(v=INTEGERS), "v has dtype int32"),
    ("gated_delta_rule", lambda: delta(beta=HEADS), "one number per head"),
    ("gated_delta_rule", lambda: delta(log_decay=TOKENS), "per channel"),
    (
        "linear_recurrence",
        lambda: call("linear_recurrence", x=INTEGERS, log_decay=TOKENS),
        "x has dtype int32",
    ),
    (
        "linear_recurrence",
        lambda: call("linear_recurrence", x=TOKENS, log_decay=GATES),
        "broadcast_to",
    ),
    ("recurrence", lambda: recur(local=None), "local is of type NoneType, without summary"),
    ("recurrence", lambda: recur(inputs={}), "at least one such array"),
    (
        "recurrence",
        lambda: recur(local=Returns((1, 8))),
        r"returned arrays of shapes \[\(1, 8\)\] for rows \(1, 16\). Return \[G, rows",
    ),
    (
        "recurrence",
        lambda: recur(local=Returns((1, 16)), mesh=OF_HEADS, head_axis="tensor"),
        r"an output is \[B, T\] but head_axis .* Return \[B, T, heads\], or pass head_axis=\(\)",
    ),
    (
        "shift_documents",
        lambda: sequence.shift_documents(TOKENS, 1, segment_ids=IDS[0]),
        r"segment_ids has shape \(16,\) but must be \[B, columns\]",
    ),
    (
        "shift_documents",
        lambda: sequence.shift_documents(TOKENS[:, :8], 1, segment_ids=IDS),
        r"an array has shape \(1, 8, 4\) but segment_ids \(1, 16\)",
    ),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
