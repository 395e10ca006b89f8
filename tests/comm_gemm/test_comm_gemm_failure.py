"""A rank misses a product: all others get one error in time, and the process continues."""

from functools import partial

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import GATHER, SCATTER, K, M, N, T, W, ones
from on_mesh import AXIS, mesh_of, on_ranks

pytestmark = pytest.mark.usefixtures("unchecked_types")

DEADLINE = 2.0


def expect_everywhere(result, match, *, but=()):
    """Every rank gets the same error; the next computation runs."""
    errors = set()
    for rank, shard in enumerate(result.addressable_shards):
        if rank not in but:
            with pytest.raises(jax.errors.JaxRuntimeError, match=match) as error:
                np.asarray(shard.data)
            errors.add(str(error.value))
    assert len(errors) == 1
    x, w = ones(M, K), ones(K, N)
    got = on_ranks(SCATTER, mesh_of(W))(x, w)
    np.testing.assert_array_equal(got, oracle.matmul_reduce_scatter(x, w))


@pytest.mark.parametrize("op, options", [(GATHER, {}), (SCATTER, {"method": "pipeline"})])
def test_rank_that_never_comes(op, options):
    """All others wait until the deadline and name the missing rank."""
    x, w = ones(M, K), ones(K, N)

    def local(x, w):
        here = lambda x: op(x, w, deadline=DEADLINE, **options)
        away = lambda x: jnp.zeros_like(jax.eval_shape(here, x)) + 0 * x[0, 0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, away, here, x)

    program = on_ranks(local, mesh_of(W), check_vma=False).lower(x, w).compile()
    expect_everywhere(
        program(x, w),
        rf"{op.func.__name__} over axis 'cp': deadline of 2000 ms passed: 3/4 ranks arrived, ranks "
        r"\[0, 1, 2\] wait for missing ranks \[3\]",
        but=(3,),  # it has no call that could fail
    )


def test_deadline_is_a_minute_and_can_be_set():
    for options, milliseconds in (({}, 60_000), ({"deadline": 0.25}, 250)):
        text = on_ranks(partial(GATHER, **options), mesh_of(W)).lower(ones(T, K), ones(K, N))
        assert f"deadline_ms = {milliseconds} : i64" in text.as_text()
