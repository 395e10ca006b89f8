"""Arguments that layers beside attention refuse, before anything is compiled."""

import numpy as np
import pytest
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import sequence

TOKENS = np.zeros((1, 16, 4), np.float32)
HEADS = np.zeros((1, 16, 2, 4), np.float32)
GATES = np.zeros((1, 16, 2), np.float32)
IDS = np.ones((1, 16), np.int32)
INTEGERS = np.zeros((1, 16, 4), np.int32)
DELTA = {"q": HEADS, "k": HEADS, "v": HEADS, "log_decay": GATES, "beta": GATES}
CONV = {"x": TOKENS, "weight": np.zeros((3, 4), np.float32)}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("op", "given", "error", "match"),
    [
        ("shift", {"x": TOKENS, "offset": 1.5}, TypeError, "offset"),
        ("shift", {"x": {}, "offset": 1}, ValueError, "at least one such array"),
        ("shift", {"x": TOKENS, "offset": 1, "layout": "striped"}, ValueError, "layout"),
        ("causal_conv", CONV | {"weight": np.zeros((3, 5))}, ValueError, "weight for each tap"),
        ("causal_conv", CONV | {"bias": np.zeros(3)}, ValueError, "one value for each channel"),
        ("causal_conv", CONV | {"segment_ids": IDS[:, :8]}, ValueError, "segment_ids has shape"),
        ("causal_conv", CONV | {"segment_ids": IDS * 1.0}, TypeError, "needs to be integers"),
        ("causal_conv", CONV | {"plan": "plan"}, TypeError, "plan"),
        (
            "causal_conv",
            CONV | {"segment_ids": [[1] * 16]},
            TypeError,
            "segment_ids is of type list",
        ),
        (
            "causal_conv",
            CONV | {"x": INTEGERS},
            TypeError,
            "x has dtype int32; it needs to be floats",
        ),
        ("gated_delta_rule", DELTA | {"v": INTEGERS}, TypeError, "v has dtype int32"),
        ("linear_recurrence", {"x": INTEGERS, "log_decay": TOKENS}, TypeError, "x has dtype int32"),
        ("gated_delta_rule", DELTA | {"q": TOKENS}, ValueError, "Pass heads as axis 2"),
        ("gated_delta_rule", DELTA | {"beta": HEADS}, ValueError, "one number per head"),
        ("gated_delta_rule", DELTA | {"log_decay": TOKENS}, ValueError, "per channel"),
        ("linear_recurrence", {"x": TOKENS, "log_decay": GATES}, ValueError, "broadcast_to"),
        ("recurrence", {"inputs": TOKENS, "local": None}, TypeError, "without summary"),
    ],
)
def test_refused(op, given, error, match):
    function = getattr(sequence, op)
    with pytest.raises(error, match=f"(?s){op}: .*{match}"):
        function(**given, axis_name=AXIS, mesh=mesh_of(1))
