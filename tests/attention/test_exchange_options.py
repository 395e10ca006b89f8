"""Options of exchanges reach every custom call of attention, in both passes; lowered for GPUs."""

import re
import types
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, context_parallel_attention, place_tokens
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange

W, TOKENS, HEADS, HEAD_SIZE = 4, 32, 4, 8
IDS = np.repeat([1, 2], TOKENS // 2)[None]
OPTIONS = {"implementation": "cuda_peer", "num_comm_sm": 48, "deadline": 7.0}


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    """Pretends that the extension exists, built or not; nothing is executed."""
    extension = types.SimpleNamespace(
        set_process=lambda process, ordinals: None, device_count=lambda: (0, "no driver")
    )
    monkeypatch.setattr(runtime, "cuda", extension)


def options_in(fn, *arguments):
    """Returns the options of all exchanges of a program, and how many there are."""
    text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jax_cp_dispatch\.(?:dispatch|combine)\w*\(.*", text)
    read = lambda name, call: re.findall(rf"{name} = (\d+)", call)
    return {tuple(read("num_comm_sm", x) + read("deadline_ms", x)) for x in calls}, len(calls)


@pytest.mark.filterwarnings("ignore:jax_cp_dispatch.*kernel")
@pytest.mark.parametrize(
    "algorithm", ["balanced", "placed", "ring", "zigzag", "hamilton", "ulysses"]
)
def test_every_algorithm_in_both_passes(algorithm):
    q = np.zeros((1, TOKENS, HEADS, HEAD_SIZE), np.float32)
    documents = Documents(IDS)
    if algorithm == "placed":
        documents = place_tokens(segment_ids=IDS, world_size=W).documents
    attend = partial(
        context_parallel_attention, mesh=mesh_of(W), axis_name=AXIS, algorithm=algorithm,
        documents=documents, **OPTIONS,
    )  # fmt: skip
    loss = lambda q, k, v: (attend(q, k, v) ** 2).sum()
    found, count = options_in(jax.grad(loss, argnums=(0, 1, 2)), q, q, q)
    assert found == {("48", "7000")} and count >= 2


def test_exchanges_of_chunks():
    links = np.where(np.eye(W, dtype=bool), -1, 0)[None].repeat(2, 0)[:, :2, :2]
    for fn, num_ranks in ((ring_exchange, W), (partial(chunk_exchange, out_chunk=links[0],
                                                       in_chunk=links[1]), 2)):  # fmt: skip
        move = partial(fn, axis_name=AXIS, **OPTIONS)
        run = jax.shard_map(move, mesh=mesh_of(num_ranks), in_specs=P(AXIS), out_specs=P(AXIS))
        assert options_in(run, np.zeros((num_ranks, 3), np.float32)) == ({("48", "7000")}, 1)
