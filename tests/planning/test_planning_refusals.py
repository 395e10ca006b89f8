"""Invalid calls of `plan_attention` and `place_tokens`, and invalid configurations.

Constraints that are found by planning: test_constraints.py. Segment ids: test_segment_ids.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import PlanConfig

pytestmark = pytest.mark.usefixtures("unchecked_types")

IDS = np.ones((1, 96), int)
LENGTHS = [[600, 300, 100, 24]]
TWO_ROWS = np.array([[700, 324], [500, 400]])
PLACEMENT = cp.place_tokens([[8]], world_size=2)


def config_of(**options: Any):
    return PlanConfig(**options)


def plan(segment_ids: Any = IDS, positions: Any = None, world_size: Any = 4, **options: Any):
    options = {"config": PlanConfig(block=8), **options}
    return cp.plan_attention(segment_ids, positions, world_size=world_size, **options)


def plan_with(**config: Any):
    return plan(config=PlanConfig(**{"block": 8, **config}))


def plan_lengths(**config: Any):
    return cp.plan_attention(lengths=LENGTHS, world_size=4, config=PlanConfig(**config))


def fit(batches: Any = LENGTHS, **options: Any):
    return cp.fit_plan_config(batches, **{"world_size": 2, **options})


def place(lengths: Any = None, world_size: Any = 2, **options: Any):
    return cp.place_tokens(lengths, world_size=world_size, **options)


def place_with(**config: Any):
    return place(LENGTHS, 4, config=PlanConfig(**config))


def plan_inside(**config: Any):
    make = lambda ids: plan(ids, config=PlanConfig(**config))
    return jax.eval_shape(make, np.ones((1, 8), np.int32))


def place_inside():
    make = lambda ids: place(segment_ids=ids).plan
    return jax.eval_shape(make, np.ones((1, 8), np.int32))


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "plan_attention": [
        (lambda: plan(IDS[0]), r"int64\[96\].*segment_ids\[None\]"),
        (lambda: plan(IDS[:, :0]), "not empty"),
        (lambda: plan(positions=IDS * 2**40), "beyond 32 bits"),
        (lambda: plan(world_size=5), "96 columns cannot be split over world_size=5 ranks. Pad the"),
        (lambda: plan(world_size=0), "world_size is 0"),
        (lambda: plan(world_size=2.0), "world_size is 2.0; it needs to be an int"),
        (lambda: plan(rank=4), r"rank is 4; it needs to be in \[0, 4\), or None"),
        (lambda: plan(rank=True), "rank is True; it needs to be an integer"),
        (
            lambda: jax.eval_shape(lambda ids: plan(ids, rank=0), np.ones((1, 8), np.int32)),
            "rank is 0 but the plan is made inside jit, by all ranks. Omit rank",
        ),
        (lambda: plan(columns=96), "got columns without lengths"),
        (lambda: plan(lengths=[96]), "got both lengths and segment_ids"),
        (lambda: plan(mask="no"), "mask is .no.; it needs to be .causal."),
        (lambda: plan(mask=[cp.masks.Causal()] * 299 + [cp.masks.Full()]), "mask is a list of 300"),
        (lambda: plan(config=None), "config is of type NoneType; .*PlanConfig"),
        (lambda: plan_with(q_capacity=23), "96 queries .* 4 ranks, .* receives at least 24 of"),
        (lambda: plan_lengths(kv_capacity=599), r"document 0 \(segment id 1 of batch row 0\)"),
        (lambda: plan_lengths(kv_capacity=600, q_capacity=256), r"rank \d would receive \d+ rows"),
        (lambda: plan_with(max_kv_transfers=1), r"\d ranges of keys but max_kv_transfers is 1"),
        (lambda: plan_with(max_q_transfers=1), r"\d ranges of queries but max_q_transfers is 1"),
        (lambda: plan_with(max_pieces=1), r"would compute \d pieces but max_pieces is 1"),
        (lambda: plan_lengths(rank_speeds=(1.0, 2.0)), "rank_speeds has 2 numbers but there are 4"),
        (lambda: plan_lengths(ranks_per_node=3), "4 ranks cannot be divided into nodes of"),
        (
            lambda: plan_inside(rank_speeds=(1.0, 2.0), ranks_per_node=2),
            "do not support rank_speeds, ranks_per_node of PlanConfig",
        ),
    ],
    "PlanConfig": [
        *(
            (lambda options=options: config_of(**options), says)
            for options, says in (
                ({"max_cut_pieces": 0}, "max_cut_pieces is 0; it needs to be at least 1"),
                ({"block": 1.5}, "block is 1.5; it needs to be an integer"),
                ({"block": 0}, "block is 0; it needs to be at least 1"),
                ({"kv_capacity": True}, "kv_capacity is True; it needs"),
                ({"kv_capacity": 0}, "kv_capacity is 0; it needs to be at least 1"),
                ({"kv_capacity": 2**40}, "kv_capacity is 1099511627776, but row numbers have 32"),
                ({"ranks_per_node": 0}, "ranks_per_node is 0; it needs to be at least 1"),
                ({"balance_tolerance": -1.0}, r"balance_tolerance is -1.0; it needs to be in \["),
            )
        ),
        (lambda: PlanConfig(num_heads=0), "num_heads is 0; it needs to be at least 1"),
        *(
            (
                lambda speeds=speeds: config_of(rank_speeds=speeds),
                "rank_speeds is .*; it needs one positive number per rank",
            )
            for speeds in (
                ("a", 1),
                5,
                (),
                (1.0, 0.0),
                (1.0, float("nan")),
                (10**400,),
                (1e305, 1e305),
            )
        ),
    ],
    "fit_plan_config": [
        # Capacities from a sample.
        (lambda: fit([]), "batches is empty"),
        (lambda: fit(overflow=0.0), "overflow is 0.0; it needs to be between"),
        (lambda: fit(config={}), "config is of type dict; .*PlanConfig"),
        (lambda: fit(IDS), r"array of shape \(1, 96\).*Pass \[segment_ids\]"),
        (lambda: fit(num_groups=2), "got num_groups, .* Pass placed=True"),
        *(
            (
                lambda batch=batch: fit([[[1024], [1024]], batch], columns=1024),
                r"batch 1 is an array of shape \(2, 2\), which means segment ids.*batch.tolist\(\)",
            )
            for batch in (TWO_ROWS, jnp.array(TWO_ROWS))
        ),
    ],
    "place_tokens": [
        # Placements.
        (place, "got neither lengths nor segment_ids"),
        (lambda: place([[4]], segment_ids=IDS), "got both lengths"),
        (lambda: place([[4]], positions=IDS), "positions without segment_ids"),
        (lambda: place(segment_ids=IDS, columns=96), "columns without lengths"),
        (lambda: place([]), "lengths is empty"),
        (lambda: place([[4]], num_groups=2), "2, which must divide the 1 batch rows"),
        (lambda: place([[4]] * 2, num_groups=2, rank=0), "call slice_of on one of"),
        (lambda: place([[4, -1]]), "document 1 of batch row 0 has length -1"),
        (lambda: place([[1.5]]), "integer"),
        (lambda: place([8], layers=(1,)), "Pass masks"),
        (lambda: place([8], masks=("causal",), layers=(float("nan"),)), "positive numbers"),
        (lambda: place([8], 12, config=PlanConfig(hardware="h100")), "nodes of 8, those of"),
        (lambda: place([8], masks=("causal",), mask="causal"), "both mask and masks"),
        (lambda: place([8], masks=()), "at least one mask"),
        (lambda: place([8], masks=("causal", "full"), layers=(1,)), "one number for each mask"),
        (lambda: place([8], masks=("causal", "full"), layers=(0, 1)), "positive numbers"),
        (lambda: place([3], columns=0), "columns is 0; it needs to be at least 1"),
        (lambda: place([3], columns=8.0), "columns is 8.0; it needs to be an integer"),
        (lambda: place([[4], [9]], columns=8), "row 1 sum to 9 but columns is 8"),
        (lambda: place([[4]], columns=7), "7 columns cannot be split over world"),
        (lambda: place([[4]], 0), "world_size is 0; it needs to be at least 1"),
        (lambda: place([[4]], rank=2), r"rank is 2; it needs to be in \[0, 2\)"),
        # As lengths they would give a placement of other tokens.
        (lambda: place(IDS), r"shape \(1, 96\).*Pass segment ids as segment_ids="),
        (place_inside, "segment_ids is traced.* outside jit"),
        (lambda: place([[4]], config={}), "config is of type dict; .*PlanConfig"),
        (lambda: place_with(kv_capacity=599), "receives at least 600 rows, but kv_capacity is"),
        (lambda: place_with(max_kv_transfers=1), r"rank \d would send \d+ ranges of keys but"),
        (lambda: place_with(max_pieces=1), r"rank \d would hold \d+ pieces but max_pieces is 1"),
        (lambda: place_with(block=300), "block is 300 but a rank holds 256 tokens"),
        (lambda: place_with(rank_speeds=(1.0, 2.0)), "rank_speeds has 2 numbers but there are 4"),
        (lambda: place_with(ranks_per_node=3), "4 ranks cannot be divided into nodes of"),
        (
            lambda: place([[100] * 9 + [60]], 4, config=PlanConfig(kv_capacity=239)),
            r"would receive \d+ rows but kv_capacity is 239. Pass",
        ),
    ],
    "Placement.slice_of": [
        (lambda: place([[4]] * 2, num_groups=2).slice_of(0), "got 2 groups. Call it on one of")
    ],
    "Placement.apply": [
        (lambda: PLACEMENT.apply(np.zeros((1, 9))), r".*shape \[1, 9\] but the documents are"),
        (lambda: PLACEMENT.apply([1, 2]), "got a value of type int; all leaves"),
    ],
}


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)


# ---- Lengths in every form that a data loader has, and those that cannot be planned.


def plan_of(lengths: Any, **options: Any):
    return cp.plan_attention(lengths=lengths, **options)


def placed_plan_of(lengths: Any, **options: Any):
    return cp.place_tokens(lengths, **options).plan


both = pytest.mark.parametrize("make", [plan_of, placed_plan_of])


@both
def test_all_forms_are_the_same_lengths(make):
    expected = make([[5, 3, 4]], world_size=2)
    for lengths in (
        (5, 3, 4), np.array([5, 3, 4], np.uint8), jnp.array([5, 3, 4]), iter([5, 3, 4]),
        [np.int64(5), np.array(3), jnp.int32(4)], [iter([5, 3, 4])], [np.array([5, 3, 4])],
        [jnp.array([5, 3, 4])],
    ):  # fmt: skip
        found = make(lengths, world_size=2)
        for name in ("run_row", "run_position", "run_origin", "fingerprint"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.num_tokens == expected.num_tokens == 6


@both
def test_numpy_sizes_do_not_overflow(make):
    """Products of sizes in 32 bits would."""
    found = make([2**20] * 4096, world_size=np.int32(4096), rank=np.int32(1))
    assert found.num_tokens == 2**20 and type(found.world_size) is int


@both
@pytest.mark.parametrize(
    "lengths, message",
    [
        (5, r"lengths is 5; it needs a list of lengths, such as \[700, 200\]"),
        ([3, [4]], "batch row 0 are numbers and lists; they need to be a list"),
        ([[4], 3], r"batch row 1 are int64 of shape \(\); they need to be a list of integers"),
        ([[True]], r"batch row 0 are bool of shape \(1,\)"),
        ([7, 2**31], "document 1 of batch row 0 has 2147483648 tokens, but positions have 32 bits"),
        (np.array([2**63 + 5], np.uint64), "has 9223372036854775813 tokens, but positions have 32"),
        ([2**30] * 16, "a rank would hold 8589934592 tokens, but row numbers have 32 bits"),
        ([1_200_000_000] * 3, r"rank \d would receive 2400000000 rows.*, but row numbers have 32"),
    ],
)
def test_lengths_that_cannot_be_planned(make, lengths, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(lengths, world_size=2)


@both
def test_counts_beyond_64_bits_are_rejected(make):
    long = 2**31 - 1
    make([long], world_size=2)
    with pytest.raises(ValueError, match="query-key pairs of 8589934588 tokens exceed 62 bits"):
        make([long] * 4, world_size=4)
