"""Invalid calls of metadata and scenarios: each is rejected before anything is computed.

Of `Metadata.validate`: test_metadata_object.py.
"""

from typing import Any

import jax
import numpy as np
import pytest
from metadata_oracle import kv_arguments, plan
from refusals import NO_PLAN, X, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv
from jax_cp_dispatch.scenarios import create_qkv_dispatch, gen_seq_lens, orchestrate_simulate

pytestmark = pytest.mark.usefixtures("unchecked_types")

SEQ_LEN = np.array([[4, 0, 6], [3, 5, 0]])
DISPATCH = np.array([[1, 0, 0], [0, 1, -1]])
PLAN = cp.Metadata(**plan(SEQ_LEN, DISPATCH)[0], world_size=2)  # by NumPy: compiles nothing
KEY = jax.random.key(0)
OUT = np.zeros((2, 3), np.float32)


def plan_q(seq_len: Any = SEQ_LEN, dispatch: Any = DISPATCH, **options: Any):
    return cp.compute_metadata(seq_len, dispatch, **options)


def plan_kv(position, change):
    arguments = list(kv_arguments())
    arguments[position] = change(arguments[position])
    compute_metadata_kv(*arguments)


def lengths(world_size: Any = 2, num_seqs: Any = 4, total_len: Any = 8):
    return gen_seq_lens(KEY, world_size, num_seqs, total_len)


def simulate(output: Any = OUT, plan: Any = PLAN):
    return orchestrate_simulate(np.zeros((2, 3), np.float32), output, plan)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "compute_metadata": [
        (lambda: plan_q(SEQ_LEN * 1.0), "seq_len is float64.*needs integers"),
        (lambda: plan_q(dispatch=DISPATCH + 1), "dispatch at rank 0, slot 0 is 2; it needs to lie"),
        (lambda: plan_q(-SEQ_LEN), "seq_len at rank 0, slot 0 is -4; it needs to"),
        (lambda: plan_q(SEQ_LEN * 2**29), "of rank 0 is 5368709120 tokens; at most 4294967295"),
        (lambda: plan_q(max_recv_seqs=2), "rank 0 would receive 3 shards but max_recv_seqs is 2."),
        (lambda: plan_q(max_recv_seqs=0), "at least 1"),
        (lambda: jax.eval_shape(lambda n: plan_q(max_recv_seqs=n), 4), "max_recv_seqs is traced;"),
        (lambda: jax.eval_shape(cp.compute_metadata, SEQ_LEN, DISPATCH), "traced values. Pass"),
    ],
    "compute_attn_layout_seqlens": [
        (
            lambda: compute_attn_layout_seqlens(SEQ_LEN, SEQ_LEN[:1], DISPATCH),
            r"shard_context is int\d+\[1, 3\]; it needs",
        )
    ],
    "compute_metadata_kv": [
        *(
            (lambda args=args: plan_kv(*args), says)
            for *args, says in (
                (0, lambda x: x[..., :1], "kv_to_q_mapping is int"),
                (0, lambda x: np.where(x >= 0, x + 9, x), "kv_to_q_mapping at rank"),
                (1, lambda x: x + 9, "kv_to_q_rank at rank"),
                (1, lambda x: x.clip(max=0), "kv_to_q_rank .* differ from the other KV shards"),
                (3, lambda x: x - (x > 0), "kv_to_q_rank at rank"),  # one place too few
                (2, lambda x: x + 99, "kv_context_size at rank"),
                (6, lambda x: x + 99, "num_seqs at rank 0"),
                (7, lambda x: x + 9, "q_dispatch at rank 0, slot 0"),
            )
        )
    ],
    "gen_seq_lens": [
        (lambda: lengths(world_size=0), "world_size is 0; it needs to be at least 1"),
        (lambda: lengths(world_size=True), "world_size is True; it needs to be an int"),
        (lambda: lengths(num_seqs=2.0), "num_seqs is 2.0; it needs to be"),
        (lambda: lengths(total_len=10.5), "total_len is 10.5; it needs to be"),
        (lambda: lengths(total_len=3), "total_len 3 is less than num_seqs 4, .* Pass total_len>=4"),
    ],
    "create_qkv_dispatch": [
        *(
            (lambda sizes=sizes: create_qkv_dispatch(KEY, *sizes), says)
            for sizes, says in (
                ((0, 8, 1, 4), "world_size is 0; it needs to be at least 1"),
                ((2, 10, 1, 4), "10 is not divisible.*Pass a multiple of 4"),
                ((2, 8, 3, 4), "too short"),
                ((2, 8, 1, 0), "at least 1"),
            )
        )
    ],
    "orchestrate_simulate": [
        (lambda: orchestrate_simulate(X[:2], X[:1], PLAN), r"shape \(1, 6, 2\); it needs all 2"),
        (lambda: simulate(OUT[:, :, None]), "row of output"),
        (lambda: simulate(plan=PLAN.get_slice(0)), "metadata has shape"),
        (lambda: simulate(plan=NO_PLAN), "of type ndarray; it needs"),
    ],
}


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
