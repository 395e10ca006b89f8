"""Invalid calls of layers beside attention: each is rejected before anything is compiled."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import check_rejected, each

from jax_cp_dispatch import Documents, place_tokens, sequence

TOKENS = np.zeros((1, 16, 4), np.float32)
HEADS = np.zeros((1, 16, 2, 4), np.float32)
INTEGERS = np.zeros((1, 16, 4), np.int32)
GATES = np.zeros((1, 16, 2), np.float32)
IDS: Any = np.ones((1, 16), np.int32)
KERNEL = SimpleNamespace(summary=len, apply=len, run=len)
OVER_HEADS: Any = {"mesh": permuted_mesh((1, 2), (AXIS, "tensor")), "head_axis": "tensor"}
DOCUMENTS = Documents(IDS)
OF_2 = place_tokens([[12]], world_size=2).documents


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


class OneState(Returns):
    """A kernel whose states have no heads."""

    def summary(self, inputs: Any) -> Any:
        return inputs.sum()

    def run(self, inputs: Any, states: Any, piece_ids: Any) -> Any:
        return inputs


def call(op: str, **given: Any):
    return getattr(sequence, op)(**{"axis_name": AXIS, "mesh": mesh_of(1), **given})


def shift(x: Any = TOKENS, **given: Any):
    return call("shift", x=x, **{"offset": 1, **given})


def conv(**given: Any):
    return call("causal_conv", **{"x": TOKENS, "weight": np.zeros((3, 4), np.float32), **given})


def checked(**given: Any):
    checksums = sequence.token_checksums(IDS, documents=DOCUMENTS)
    known = {"arrays": IDS, "checksums": checksums, "documents": DOCUMENTS}
    return call("check_tokens", **{**known, **given})


def delta(**given: Any):
    heads = {"q": HEADS, "k": HEADS, "v": HEADS, "log_decay": GATES, "beta": GATES}
    return call("gated_delta_rule", **{**heads, **given})


def recur(**given: Any):
    return call("recurrence", **{"inputs": TOKENS, "local": KERNEL, **given})


def shift_of_pieces_in_zigzag_order():
    documents = DOCUMENTS.zigzag(2)

    def on_rank(x, documents):
        pieces = sequence.document_pieces(documents, axis_name=AXIS)
        return sequence.shift(x, 1, axis_name=AXIS, documents=pieces, return_state=True)

    specs = {"in_specs": (P(None, AXIS), documents.specs(AXIS)), "out_specs": P()}
    return jax.eval_shape(jax.shard_map(on_rank, mesh=mesh_of(2), **specs), TOKENS, documents)


def shift_of_pieces_of_a_sharded_batch():
    mesh = permuted_mesh((2, 2), ("data", AXIS), (AxisType.Explicit, AxisType.Auto))
    rows = NamedSharding(mesh, P("data", AXIS))
    x, ids = jax.device_put((np.zeros((2, 8, 4), np.float32), np.ones((2, 8), np.int32)), rows)

    def on_rank(x, documents):
        pieces = sequence.document_pieces(documents, axis_name=AXIS)
        return sequence.shift(x, 1, axis_name=AXIS, documents=pieces)

    documents = Documents(ids)
    specs = {"in_specs": (P(None, AXIS), documents.specs(AXIS)), "out_specs": P(None, AXIS)}
    with jax.set_mesh(mesh):
        run = jax.shard_map(on_rank, **specs, axis_names={AXIS})
        return jax.eval_shape(run, x, documents)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "shift": [
        (lambda: shift(offset=1.5), "offset is 1.5; it needs to be an int"),
        (lambda: shift(INTEGERS, fill=0.5), "fill is 0.5, but .* int32. Pass an integer in"),
        (lambda: shift(INTEGERS > 0, fill=2), r"fill is 2, but .* bool. Pass .* \[0, 1\]"),
        (lambda: shift(INTEGERS.astype(np.uint8), fill=-1), r"fill is -1, but .* \[0, 255\]"),
        (lambda: shift(documents="no"), "documents is of type str.* Pass Documents"),
        (lambda: shift(documents=DOCUMENTS, positions=IDS), "got documents, and segment_ids or"),
        (lambda: shift(documents=DOCUMENTS.zigzag(2), mesh=mesh_of(4)), "the documents are in"),
        (lambda: shift(documents=OF_2), r"segment_ids has shape \(1, 12\)"),
        (lambda: shift(TOKENS[:, :12], documents=OF_2), "plan is for world_size=2 but .* Place"),
        (
            lambda: shift(documents=DOCUMENTS.zigzag(2), mesh=mesh_of(2), return_state=True),
            "the documents are in zigzag order .*; initial_state and return_state need packed",
        ),
        (
            lambda: shift(TOKENS[:, :12], documents=OF_2, mesh=mesh_of(2), initial_state=TOKENS),
            "initial_state has shapes .*(1, 16, 4).* it needs .*(1, 1, 4).* Pass the last rows",
        ),
        (
            shift_of_pieces_in_zigzag_order,
            "need packed order, but the pieces .* Pass document_pieces",
        ),
        (shift_of_pieces_of_a_sharded_batch, "pieces are those of a whole rank, but an explicit"),
        (lambda: shift(offset=-1, return_state=True), "offset is -1; .* Omit both, or shift whole"),
        (
            lambda: shift([HEADS, TOKENS[..., :3]], **OVER_HEADS),
            r"an array has shape \(1, 16, 3\) but head_axis .* has 2 devices.* Pass head_axis=\(\)",
        ),
    ],
    "shift_documents": [
        (
            lambda: sequence.shift_documents(INTEGERS, 1, segment_ids=IDS, fill=2**40),
            "fill is 1099511627776, but an array has dtype int32",
        )
    ],
    "token_checksums": [
        (lambda: sequence.token_checksums(IDS, documents=IDS), "Pass Documents"),
        (
            lambda: sequence.token_checksums(IDS[:, :8], documents=DOCUMENTS),
            r"array 0 is int32\[1, 8\]; it needs .* start with \[1, 16\]",
        ),
        (lambda: sequence.token_checksums(IDS * 1j, documents=DOCUMENTS), "is complex128"),
    ],
    "check_tokens": [
        (lambda: checked(arrays={"labels": IDS, "tokens": IDS}), "are of 1 arrays but got 2. Pass"),
        (lambda: checked(documents=DOCUMENTS.zigzag(2)), "documents are in zigzag order"),
    ],
    "causal_conv": [
        (lambda: conv(weight=np.zeros((3, 5))), "weight for each tap"),
        (lambda: conv(bias=np.zeros(3)), "one value for each channel"),
        (
            lambda: conv(initial_state=TOKENS[:, :3]),
            "initial_state is .* with B = 1, C = 4 as in x; W = 3 as in weight. Pass the last",
        ),
    ],
    "gated_delta_rule": [
        (lambda: delta(initial_state=TOKENS), r"needs floats \[B, N, H, Hv\] .* Pass a state for"),
        (
            lambda: delta(**dict.fromkeys("qk", TOKENS[..., None])),
            "v has 2 heads but k has 4, which must divide them",
        ),
        (
            lambda: delta(v=HEADS[:, :, :0], log_decay=GATES[..., :0], beta=GATES[..., :0]),
            "v has 0 heads but k has 2",
        ),
        (lambda: delta(**dict.fromkeys("qk", HEADS[..., :0])), "heads of q and k have size 0;"),
        (lambda: delta(log_decay=TOKENS), r"log_decay is .*N = 2 as in v. .* per channel"),
        (
            lambda: delta(log_decay=GATES + 1),
            r"log_decay\[0, 0, 0\] is 1; it needs to be at most 0",
        ),
    ],
    "linear_recurrence": [
        (lambda: call("linear_recurrence", x=TOKENS, log_decay=GATES), "broadcast_to"),
        (lambda: call("linear_recurrence", x=TOKENS, log_decay=TOKENS + 2), "is 2; it needs to be"),
    ],
    "recurrence": [
        (lambda: recur(local=None), "local is of type NoneType, without summary"),
        (
            lambda: recur(local=Returns((1, 16)), initial_state=TOKENS[:, 0, 0], return_state=True),
            r"initial_state has shapes \(\(1,\), 'float32'\); it needs \(\(1, 4\), 'float32'\)",
        ),
        (
            lambda: recur(local=OneState(()), return_state=True, **OVER_HEADS),
            r"a state is \[B\] but head_axis \('tensor',\) shards axis 1",
        ),
        (lambda: recur(local=Returns((1, 8))), r"returned arrays of shapes \[\(1, 8\)\] for rows"),
        (
            lambda: recur(local=Returns((1, 16)), **OVER_HEADS),
            r"an output is \[B, T\] but head_axis .* Return \[B, T, heads\], or pass",
        ),
    ],
}


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
