"""Calibration: known constants are recovered from times that the model itself gives.

No time is measured: virtual machines with known constants take the place of measurements.
"""

import dataclasses

import numpy as np
import pytest

from jax_cp_dispatch.cost import (
    HARDWARE,
    AttentionRate,
    Hardware,
    Measurement,
    Workload,
    calibrate,
    predict,
    step_costs,
)

TRUE = Hardware(
    matmul_flops=1.0,
    link_bandwidth=7e9,
    link_latency=30e-6,
    topology="shared_memory",
    cores=2,
    rank_latency=11e-6,
    cache_bytes=16e6,
    cache_bandwidth=21e9,
    near_cache_bytes=1e6,
    near_cache_bandwidth=35e9,
    memory_bandwidth=9e9,
    attention=AttentionRate(
        flops=310e9,
        backward_flops=270e9,
        exponentials=1.7e9,
        half_rate_rows=60.0,
        tile_rows=256,
        planned_tile_rows=128,
        least_tile_queries=64,
        tile_keys=128,
    ),
)
MOVEMENT = (
    *("link_bandwidth", "link_latency", "rank_latency"),
    *("cache_bandwidth", "cache_bytes", "near_cache_bandwidth", "near_cache_bytes"),
)
ATTENTION = (
    *(f"attention.{x}" for x in ("flops", "backward_flops", "exponentials", "half_rate_rows")),
    "memory_bandwidth",
)
EXCHANGES = [(n, 2**power) for n in (2, 4, 8) for power in (14, 18, 20, 22, 24)]
CALLS = [
    (algorithm, backward, Workload(8, tokens, *heads, itemsize=4, lengths=(lengths,)))
    for tokens, heads, lengths in (
        (512, (4, 4, 64), (4096,)),
        (1024, (2, 2, 128), (5000, 100, 3092)),
        (512, (8, 2, 64), (900, 20, 80, 3096)),
    )
    for algorithm in ("ring", "zigzag", "balanced", "placed")
    for backward in (False, True)
]


def exchange(num_ranks, num_bytes):
    return lambda hardware: hardware.exchange_seconds(num_bytes, num_ranks=num_ranks, inside=1)


def attention(algorithm, backward, workload):
    moves = {"moved_tokens": (30, 700), "placed_tokens": 900}

    def seconds(hardware):
        steps = step_costs(algorithm, workload, hardware=hardware, backward=backward, **moves)
        return sum(step.compute + step.communication for step in steps)

    return seconds


def numbers(hardware, names):
    owners = {"": hardware, "attention": hardware.attention}
    split = [name.rpartition(".") for name in names]
    return np.array([getattr(owners[where], field) for where, _, field in split])


def disturbed(hardware, names, factor):
    attention = {x.split(".")[1]: 0 for x in names if "." in x}
    own = {x: factor * getattr(hardware, x) for x in names if "." not in x}
    rates = {x: factor * getattr(hardware.attention, x) for x in attention}
    return dataclasses.replace(
        hardware, attention=dataclasses.replace(hardware.attention, **rates), **own
    )


@pytest.mark.parametrize(
    "names, functions",
    [
        (MOVEMENT, [exchange(*x) for x in EXCHANGES]),
        (ATTENTION, [attention(*x) for x in CALLS]),
    ],
    ids=["movement", "attention"],
)
@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_known_constants_are_recovered(names, functions, factor):
    measured = [Measurement(function(TRUE), function) for function in functions]
    found = calibrate(disturbed(TRUE, names, factor), measured, constants=names)
    np.testing.assert_allclose(numbers(found, names), numbers(TRUE, names), rtol=0.02)


def test_noise_changes_predictions_little():
    """Times with 5 % noise: predictions of other calls stay within 5 % of the truth."""
    rng = np.random.default_rng(0)
    functions = [attention(*x) for x in CALLS]
    noise = np.exp(rng.normal(0, 0.05, len(functions)))
    measured = [Measurement(f(TRUE) * x, f) for f, x in zip(functions, noise, strict=True)]
    found = calibrate(disturbed(TRUE, ATTENTION, 1.5), measured, constants=ATTENTION)
    other = Workload(4, 2048, 4, 2, 64, itemsize=4, lengths=((3000, 5000),))
    for algorithm in ("ring", "zigzag", "placed"):
        seconds = attention(algorithm, True, other)
        assert seconds(found) == pytest.approx(seconds(TRUE), rel=0.05)


def test_machines_with_links_can_be_calibrated():
    """Overlap hides one of two times in a step; both constants still decide some measurements."""
    true = dataclasses.replace(HARDWARE["h100"], matmul_flops=480e12, link_bandwidth=290e9)
    functions = [
        lambda hardware, tokens=tokens: (
            predict(Workload(8, tokens, 32, 8, 128, 2), hardware=hardware)["ring"].total
        )
        for tokens in (512, 1024, 32768, 65536)
    ]
    measured = [Measurement(function(true), function) for function in functions]
    names = ("matmul_flops", "link_bandwidth")
    found = calibrate(HARDWARE["h100"], measured, constants=names)
    np.testing.assert_allclose(numbers(found, names), numbers(true, names), rtol=0.02)


def test_a_constant_that_decides_no_time_keeps_its_start():
    measured = [Measurement(f(TRUE), f) for f in map(exchange, (2, 2), (2**24, 2**25))]
    start = dataclasses.replace(TRUE, link_bandwidth=5e9, rank_latency=77e-6)
    found = calibrate(start, measured, constants=("link_bandwidth", "rank_latency"))
    assert found.rank_latency == pytest.approx(77e-6)
    assert found.link_bandwidth == pytest.approx(7e9, rel=0.02)


def test_errors_name_the_remedy():
    one = [Measurement(1.0, lambda hardware: 1.0)]
    with pytest.raises(ValueError, match=r"got 1 measurements for 2 constants. Measure at least"):
        calibrate(TRUE, one, constants=("link_bandwidth", "link_latency"))
    with pytest.raises(ValueError, match=r"a measured time is not positive. Pass seconds"):
        calibrate(TRUE, [Measurement(0.0, lambda hardware: 1.0)], constants=("link_bandwidth",))
    for name in ("speed", "topology", "attention.speed", "links.bandwidth"):
        with pytest.raises(ValueError, match=f"'{name}' is not a number of the hardware"):
            calibrate(TRUE, one, constants=(name,))
    with pytest.raises(ValueError, match="memory_bandwidth is inf at the start"):
        calibrate(HARDWARE["h100"], one, constants=("memory_bandwidth",))
    with pytest.raises(ValueError, match="exponentials is 0; it needs a positive rate"):
        AttentionRate(1.0, exponentials=0)
    with pytest.raises(ValueError, match="half_rate_rows is -1; it needs at least 0"):
        AttentionRate(1.0, half_rate_rows=-1)
