"""Rings in many blocks, over many batches by one program, and without tokens.

Their values in all other respects: test_values.py.
"""

import numpy as np
from sequences import Case, check, draw, out_and_gradients, run

from jax_cp_dispatch.attention.rotating import sequence
from jax_cp_dispatch.attention.rotating.schedules import DirectSchedule
from jax_cp_dispatch.masks import SlidingWindow


def test_many_blocks(monkeypatch):
    """As with many rows: several blocks of queries and keys, the last ones padded."""
    case = Case("hamilton", 3, 26, documents="both", mask=SlidingWindow(30), heads=(4, 2), batch=2)
    blocks = {"block_q": 8, "block_kv": 8}
    monkeypatch.setattr(sequence, "rank_blocks", lambda *_, **__: blocks)
    check(case, draw(case))


def test_one_program_serves_all_batches_and_repeats_bit_for_bit():
    """The documents of a batch are data: a new batch causes no new trace."""
    case = Case("hamilton", 3, 8, documents="segments", zigzag=True)
    program = out_and_gradients(case)
    operands = [draw(case, seed) for seed in range(4)]
    operands[1][4][:] = 0  # all padding
    operands[2][4][:] = np.arange(1, 25)  # documents of one token
    operands[3][4][:] = 1
    results = [check(case, each, program) for each in operands]
    assert not any(x.any() for x in results[1])
    for first, second in zip(results[0], run(case, operands[0], program), strict=True):
        np.testing.assert_array_equal(first, second)
    assert program._cache_size() == 1


def test_no_tokens():
    case = Case("hamilton", 3, 0)
    for result in out_and_gradients(case)(*draw(case)):
        assert result.size == 0 and result.shape[:2] == (1, 0)


def test_the_direct_schedule_uses_each_link_once_per_step():
    for n in (2, 5, 8):
        schedule = DirectSchedule(n)
        held = [[schedule.held(rank, step) for rank in range(n)] for step in range(n)]
        source, chunk = np.moveaxis(np.array(held), 2, 0)  # each [step, rank, slot]
        seen = np.sort((source * n + chunk).swapaxes(0, 1).reshape(n, -1), axis=1)  # of each rank
        every_chunk = (np.arange(n)[:, None] * n + np.arange(n - 1)).ravel()
        np.testing.assert_array_equal(seen, np.broadcast_to(every_chunk, seen.shape))
        others = np.delete(np.tile(np.arange(n), (n, 1)), np.arange(n) * (n + 1))
        for step in source[1:]:
            np.testing.assert_array_equal(np.sort(step, axis=1), others.reshape(n, n - 1))
