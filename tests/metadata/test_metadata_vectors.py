"""Planning against recorded results of another implementation; tests/data names the source."""

import json
import pathlib

import metadata_oracle as oracle
import numpy as np
import pytest

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv

VECTORS = pathlib.Path(__file__).parents[1] / "data" / "metadata"
HAND_CASES = VECTORS / "compute_metadata_hand_cases.json"
FILES = sorted(VECTORS.glob("qkv_*.npz"))


def fields(vector, prefix, names):
    return {name: vector[prefix + name] for name in names if prefix + name in vector}


PLAN = ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "num_seqs", "num_total_recv_tokens")
HOME = ("seq_recv_mask", "recv_seq_lens")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_scenarios(path):
    vector = dict(np.load(path))
    # This vector lacks the total column.
    vector["kv_rev_num_recv_tokens"] = oracle.with_total(vector["kv_rev_num_recv_tokens"])
    seq_len, dispatch = vector["in_cp_seq_lens"], vector["in_cp_query_dst"]
    context = vector["in_kv_context_size"]
    plans = {
        "q": compute_metadata(seq_len, dispatch),
        "kv": compute_metadata_kv(
            vector["in_kv_to_q_mapping"], vector["in_kv_to_q_rank"], context,
            vector["in_num_kv_to_q"], vector["in_num_total_kv_to_q"], seq_len,
            vector["in_num_cp_shards"], dispatch,
        ),
    }  # fmt: skip
    for name, (forward, reverse) in plans.items():
        oracle.assert_fields(forward, fields(vector, f"{name}_fwd_", PLAN))
        oracle.assert_fields(reverse, fields(vector, f"{name}_rev_", PLAN + HOME))
        forward.validate()
        reverse.validate()

    got = compute_attn_layout_seqlens(seq_len, context + seq_len, dispatch)
    want = {name: vector["attn_fixed_" + name] for name in got._fields if "num" not in name}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):  # recorded without the leading zero
        want[name] = np.pad(want[name], ((0, 0), (1, 0)))
    want["num_local_seqs"] = vector["attn_fixed_num_local_seqs_recv"]
    oracle.assert_fields(got, want)


def test_hand_cases():
    cases = json.loads(HAND_CASES.read_text())
    assert len(cases) == 11
    for case in cases.values():
        vector = {name: np.array(value) for name, value in case.items()}
        # The records contain non-zero lengths; a slot in use may have length 0.
        for prefix in ("fwd", "rev"):
            used = (vector[prefix + "_dst_rank"] >= 0).reshape(
                *vector[prefix + "_seq_len"].shape, -1
            )
            vector[prefix + "_num_seqs"] = oracle.last_used(used.any(-1))
        forward, reverse = compute_metadata(vector["seq_len"], vector["dispatch"])
        oracle.assert_fields(forward, fields(vector, "fwd_", PLAN))
        oracle.assert_fields(reverse, fields(vector, "rev_", PLAN + HOME))
