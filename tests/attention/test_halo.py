"""What halo attention moves: the rows that some query of a rank sees, once, in one exchange a pass.

Its values are in test_values.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import flattened
from mask_oracle import batch_ranges, range_pairs
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cost import HARDWARE, Workload
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, SlidingWindow

W, ROWS, N, K, H = 8, 6, 4, 2, 8
SIZES: dict[str, Any] = {"num_heads": N, "num_kv_heads": K, "head_size": H, "itemsize": 4}


def tokens_of_ranks(layout):
    """Returns the tokens of each rank, [W, ROWS]."""
    if layout == "contiguous":
        return np.arange(W * ROWS).reshape(W, ROWS)
    blocks = np.arange(W * ROWS).reshape(2 * W, -1)
    return np.stack([np.append(blocks[r], blocks[2 * W - 1 - r]) for r in range(W)])


def rows_between_ranks(layout, mask):
    """Counts by hand, in one document: the rows of each rank that queries of each other rank see.

    With documents that begin anywhere, any query may be the last or the first of its chunk.
    """
    if isinstance(mask, Chunked):
        mask = SlidingWindow(mask.size)
    allowed = range_pairs(*batch_ranges(mask, np.ones((1, W * ROWS), int), None))[0]
    if isinstance(mask, BlockCausal):
        allowed = np.tri(W * ROWS, k=mask.size - 1, dtype=bool)
    tokens = tokens_of_ranks(layout)
    seen = np.stack([allowed[of_rank].any(0) for of_rank in tokens])  # [receiver, token]
    return np.stack([seen[:, of_rank].sum(1) for of_rank in tokens])  # [sender, receiver]


def exchanges(layout, mask):
    """Returns the rows that a rank holds, in each exchange of a call with its gradients."""
    documents = cpd.Documents(np.ones((1, W * ROWS), int))
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    if layout == "zigzag":
        options["documents"] = documents.zigzag(W)
    attend = partial(cpd.context_parallel_attention, algorithm="halo", mask=mask, **options)
    shapes = [jax.ShapeDtypeStruct((1, W * ROWS, n, H), jnp.float32) for n in (N, K, K, N)]

    def with_gradients(q, k, v, g):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(g)

    found = []
    for equation in flattened(jax.make_jaxpr(with_gradients)(*shapes).jaxpr):
        arrays = equation.outvars if equation.primitive.name == "dispatch" else equation.invars
        if equation.primitive.name in ("dispatch", "combine"):
            rows = {x.aval.shape for x in arrays if x.aval.shape[1:] == (K, H)}
            found += [(equation.primitive.name, rows)] if rows else []  # not that of segment ids
    return found


REACHES = [
    SlidingWindow(1),
    SlidingWindow(4),
    SlidingWindow(ROWS + 1),
    SlidingWindow(8, 2),
    SlidingWindow(2 * ROWS + 4, ROWS),
    SlidingWindow(1, 5),
    Chunked(9),
    SlidingWindow(5 * ROWS),
]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_moved(layout):
    """At most those within reach of each border, whose number the predictions know."""
    borders = 1 if layout == "contiguous" else 2
    row_bytes = 2 * K * H * 4
    for mask in [*REACHES, BlockCausal(4), Causal()]:
        sent = rows_between_ranks(layout, mask)
        received = sent.sum(0) - ROWS
        before, after = mask.reach
        if before is not None and after is not None:
            assert received.max() <= borders * (before + after)
        sizes: dict[str, Any] = SIZES | {"tokens_per_rank": ROWS, "mask": mask}
        algorithm = cpd.Halo(layout)
        steps = algorithm.step_costs(Workload(W, **sizes), hardware=HARDWARE["h100"])
        assert steps[0].sent_bytes == received.sum() * row_bytes / W
        most = max(received.max(), (sent.sum(1) - ROWS).max())
        assert steps[0].most_inside == most * row_bytes
        back = algorithm.step_costs(Workload(W, **sizes), hardware=HARDWARE["h100"], backward=True)
        assert back[-1].sent_bytes == steps[0].sent_bytes  # sums of gradients, in float32
        text = algorithm.describe(Workload(W, **sizes))
        assert f"{received.sum():,} of them from another rank" in text


@pytest.mark.parametrize(
    "layout, mask",
    [("contiguous", SlidingWindow(ROWS + 1)), ("zigzag", SlidingWindow(2 * ROWS + 4, ROWS))],
)
def test_one_exchange_each_way(layout, mask):
    """No rank can receive more rows than its buffer has, and gradients leave the same buffer."""
    held = int(rows_between_ranks(layout, mask).sum(0).max())
    assert exchanges(layout, mask) == [("dispatch", {(held, K, H)}), ("combine", {(held, K, H)})]


def test_chosen_where_it_wins():
    """One order serves windows, by their halo, and whole documents, by a ring."""
    choose = partial(cpd.choose_algorithm, None, num_ranks=8, tokens_per_rank=8192, **SIZES)
    local, whole = (
        choose(mask=mask, layout="zigzag", hardware=HARDWARE["h100"])
        for mask in (SlidingWindow(512), Causal())
    )
    assert local.algorithm == cpd.Halo() and "halo" not in whole.predictions
    one_rank = choose(mask=SlidingWindow(2**20), layout="zigzag", hardware=HARDWARE["h100"])
    assert "halo" not in one_rank.predictions  # sees all keys
    rings = local.predictions["zigzag"].bytes_per_rank
    assert rings > 40 * local.predictions["halo"].bytes_per_rank


def test_auto_takes_it():
    hardware = HARDWARE["h100"]
    x = np.random.default_rng(0).normal(size=(1, 8 * 64, 2, 8)).astype(np.float32)
    options: dict[str, Any] = {"mesh": mesh_of(8), "axis_name": AXIS, "mask": SlidingWindow(4)}
    options |= {"batch_axis": (), "head_axis": ()}
    attend = partial(cpd.context_parallel_attention, x, x, x, **options)
    auto = jax.make_jaxpr(lambda: attend(algorithm=cpd.Auto(hardware)))()
    halo = jax.make_jaxpr(lambda: attend(algorithm="halo"))()
    names = [[e.primitive.name for e in flattened(x.jaxpr)] for x in (auto, halo)]
    assert names[0] == names[1]
