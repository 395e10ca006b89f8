"""`grouped_gemm` in every form, with scales of groups, and where ranks share an operand.

The contract (`tests/contract`) calls one form in all ways.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of
from scaling_oracle import FORMATS, table

from jax_cp_dispatch import grouped_gemm

K, N = 9, 6
SIZES = [([3, 0, 5, 4], 14), ([0, 0, 0], 5), ([0, 130, 2, 0], 132)]
TRANSPOSED, ROWS = ((1,), (2,)), ((0,), (0,))


def slices(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def products(lhs, rhs, sizes, bias=None):
    """[M, N] in float64; zero after the last group."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    for group, rows in enumerate(slices(sizes)):
        out[rows] = np.float64(lhs[rows]) @ rhs[group] + (0 if bias is None else bias[group])
    return out


def products_of_rows(lhs, rhs, sizes):
    """[G, K, N]"""
    return np.stack([np.float64(lhs[rows]).T @ rhs[rows] for rows in slices(sizes)])


@pytest.mark.parametrize(
    "sizes, num_rows, implementation", [*((*case, None) for case in SIZES), (*SIZES[0], "xla")]
)
def test_every_form_and_its_derivative(sizes, num_rows, implementation):
    """Ragged and empty groups, rows after the last group; integers are exact."""
    groups = len(sizes)
    lhs, rhs = integers(0, num_rows, K), integers(1, groups, K, N)
    bias, dy = integers(2, groups, N), integers(3, num_rows, N)
    call: Any = partial(grouped_gemm, implementation=implementation)

    @jax.jit
    def all_forms(lhs, rhs, bias, dy, sizes):
        form = lambda lhs, rhs, bias=None, **dims: call(lhs, rhs, sizes, bias=bias, **dims)
        turned, rows = (partial(form, contracting_dims=dims) for dims in (TRANSPOSED, ROWS))
        plain, pull = jax.vjp(form, lhs, rhs, bias)
        of_turned, pull_turned = jax.vjp(turned, lhs, jnp.swapaxes(rhs, 1, 2))
        of_rows, pull_rows = jax.vjp(rows, lhs, dy)
        return plain, *pull(dy), of_turned, *pull_turned(dy), of_rows, *pull_rows(rhs)

    dlhs = products(dy, rhs.swapaxes(1, 2), sizes)
    drhs, turned = products_of_rows(lhs, dy, sizes), products_of_rows(dy, lhs, sizes)
    dbias = np.stack([dy[rows].sum(0) for rows in slices(sizes)])
    out = products(lhs, rhs, sizes)
    wants = products(lhs, rhs, sizes, bias), dlhs, drhs, dbias, out, dlhs, turned, drhs, dlhs, out
    results = all_forms(lhs, rhs, bias, dy, np.array(sizes, np.int32))
    for got, want in zip(results, wants, strict=True):
        equal(got, want)


@pytest.mark.parametrize(
    "mode, implementation", [("CURRENT_TENSOR_SCALING", None), ("delayed_tensor_scaling", "xla")]
)
def test_one_scale_per_group(mode, implementation):
    """8-bit products, multiplied by two scales per group; also with contracted rows."""
    sizes, random = np.array([3, 0, 5, 4], np.int32), np.random.default_rng(0)

    def draw(name, *shape):
        data = random.normal(size=shape).astype(name)
        return data, table(name)[data.view(np.uint8)]

    e4m3, e5m2 = FORMATS
    (lhs, of_lhs), (rhs, of_rhs) = draw(e4m3, 12, K), draw(e5m2, 4, K, N)
    dy, of_dy = draw(e5m2, 12, N)
    scales = [random.uniform(0.5, 2, 4).astype("f") for _ in range(2)]
    options: Any = {"scaling_mode": mode, "implementation": implementation}
    options |= dict(zip(("lhs_scale_inv", "rhs_scale_inv"), map(jnp.asarray, scales), strict=True))
    call = partial(grouped_gemm, **options)
    wide = partial(call, preferred_element_type=jnp.float32)
    lhs, rhs, dy, sizes = map(jnp.asarray, (lhs, rhs, dy, sizes))
    scale = (np.float64(scales[0]) * scales[1])[:, None, None]
    close(wide(lhs, rhs, sizes), products(of_lhs, of_rhs * scale, sizes), "float32")
    got = wide(lhs, dy, sizes, contracting_dims=ROWS)
    close(got, products_of_rows(of_lhs, of_dy, sizes) * scale, "float32")
    assert jax.eval_shape(call, lhs, rhs, sizes).dtype == jnp.bfloat16


def test_gradients_where_one_operand_is_the_same_on_all_ranks():
    """Expert gradients are summed over ranks; ranks without rows take part."""
    lhs, rhs, bias = integers(0, 4, 10, K), integers(1, 3, K, N), integers(2, 3, N)
    sizes = np.array([[3, 3, 4], [0, 10, 0], [1, 2, 3], [0, 0, 0]], np.int32)

    def local(lhs, rhs, bias, sizes):
        out = grouped_gemm(lhs[0], rhs, sizes[0], bias=bias)
        return jax.lax.psum((out * out).sum(), AXIS)

    specs = {"in_specs": (P(AXIS), P(), P(), P(AXIS)), "out_specs": P()}
    loss = jax.shard_map(local, mesh=mesh_of(4), **specs)
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(lhs, rhs, bias, sizes)
    dlhs, drhs, dbias = np.zeros(lhs.shape), np.zeros(rhs.shape), np.zeros(bias.shape)
    for rank in range(4):
        dy = 2 * products(lhs[rank], rhs, sizes[rank], bias)
        dlhs[rank] = products(dy, rhs.swapaxes(1, 2), sizes[rank])
        drhs += products_of_rows(lhs[rank], dy, sizes[rank])
        dbias += np.stack([dy[rows].sum(0) for rows in slices(sizes[rank])])
    for each, want in zip(got, (dlhs, drhs, dbias), strict=True):
        equal(each, want)


def test_invalid_sizes_are_an_error_at_run_time():
    lhs, rhs = jnp.ones((4, K)), jnp.ones((2, K, N))
    for sizes, message in (
        ([3, 2], r"\[1\] is 2, so that the groups up to it have 5 rows, but there are 4"),
        ([-1, 2], r"\[0\] is -1, but a group has at least 0 rows\. Pass"),
    ):
        match = f"grouped_gemm: group_sizes{message}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            grouped_gemm(lhs, rhs, jnp.array(sizes, np.int32)).block_until_ready()
    equal(grouped_gemm(lhs, rhs, jnp.array([4, 0])), np.full((4, N), K))
    assert grouped_gemm(lhs, rhs[..., :0], jnp.array([4, 0])).shape == (4, 0)
