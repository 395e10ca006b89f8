"""`grouped_gemm` in every form, with scales of groups, and where ranks share an operand.

The contract (`tests/contract`) calls one form in all ways.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers, normal
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of
from properties import examples
from scaling_oracle import decode_byte

from jax_cp_dispatch import grouped_gemm

K, N = 9, 6
SIZES = [([3, 0, 5, 4], 12), ([0, 0, 0], 5), ([0, 130, 2, 0], 132)]
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
    "sizes, num_rows, implementation",
    [*((*case, None) for case in SIZES), (*SIZES[2], "xla")],
)
def test_every_form_and_its_derivative(sizes, num_rows, implementation):
    """Ragged and empty groups, rows after the last group; integers are exact."""
    groups = len(sizes)
    lhs, rhs = integers(0, num_rows, K), integers(1, groups, K, N)
    bias, dy = integers(2, groups, N), integers(3, num_rows, N)
    call: Any = partial(grouped_gemm, implementation=implementation)

    @jax.jit
    def all_forms(lhs, rhs, bias, dy, sizes):
        out, pull = jax.vjp(lambda *a: call(a[0], a[1], sizes, bias=a[2]), lhs, rhs, bias)
        turned = jnp.swapaxes(rhs, 1, 2)
        form = lambda lhs, rhs: call(lhs, rhs, sizes, contracting_dims=TRANSPOSED)
        of_turned, pull_turned = jax.vjp(form, lhs, turned)
        of_rows, pull_rows = jax.vjp(lambda *a: call(*a, sizes, contracting_dims=ROWS), lhs, dy)
        return out, pull(dy), of_turned, pull_turned(dy), of_rows, pull_rows(rhs)

    out, (dlhs, drhs, dbias), of_turned, (dlhs_t, drhs_t), of_rows, (dl, dr) = all_forms(
        lhs, rhs, bias, dy, np.array(sizes, np.int32)
    )
    turned = rhs.swapaxes(1, 2)
    equal(out, products(lhs, rhs, sizes, bias))
    equal(of_turned, products(lhs, rhs, sizes))
    for got in (dlhs, dlhs_t):
        equal(got, products(dy, turned, sizes))
    equal(drhs, products_of_rows(lhs, dy, sizes))
    equal(drhs_t, products_of_rows(dy, lhs, sizes))
    equal(dbias, np.stack([dy[rows].sum(0) for rows in slices(sizes)]))
    equal(of_rows, products_of_rows(lhs, dy, sizes))
    equal(dl, products(dy, turned, sizes))
    equal(dr, products(lhs, rhs, sizes))


@examples(8)
@given(sizes=st.lists(st.integers(0, 40), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_ragged_dot_is_the_oracle(sizes, seed):
    """One program serves all sizes, because it reads them at run time."""
    lhs, rhs = normal(seed, 200, 33), normal(seed + 1, 5, 33, 17)
    got, want = _BOTH(lhs, rhs, np.array(sizes, np.int32))
    inside = np.arange(200)[:, None] < sum(sizes)
    close(got, np.where(inside, np.float64(want), 0), "float32")


@jax.jit
def _BOTH(lhs, rhs, sizes):
    precision = jax.lax.Precision.HIGHEST
    return grouped_gemm(lhs, rhs, sizes), jax.lax.ragged_dot(lhs, rhs, sizes, precision=precision)


def test_types():
    """Rounded once, to the operands' type or to another one."""
    lhs, rhs = normal(0, 12, K, dtype="bfloat16"), normal(1, 4, K, N, dtype="bfloat16")
    sizes = np.array([3, 0, 5, 4], np.int32)
    expected = products(lhs.astype("float64"), rhs.astype("float64"), sizes)
    for dtype in (None, jnp.float32):
        out = jax.jit(partial(grouped_gemm, preferred_element_type=dtype))(lhs, rhs, sizes)
        assert out.dtype == (dtype or jnp.bfloat16)
        close(out, expected, out.dtype)


@pytest.mark.parametrize(
    "mode, implementation", [("CURRENT_TENSOR_SCALING", None), ("delayed_tensor_scaling", "xla")]
)
def test_one_scale_per_group(mode, implementation):
    """8-bit products, multiplied by two scales per group; also with contracted rows."""
    sizes, random = np.array([3, 0, 5, 4], np.int32), np.random.default_rng(0)
    values = {name: np.array([decode_byte(b, name) for b in range(256)]) for name in
              ("float8_e4m3fn", "float8_e5m2")}  # fmt: skip

    def draw(name, *shape):
        data = random.normal(size=shape).astype(name)
        return data, values[name][data.view(np.uint8)]

    (lhs, lhs_values), (rhs, rhs_values) = (
        draw("float8_e4m3fn", 12, K),
        draw("float8_e5m2", 4, K, N),
    )
    dy, dy_values = draw("float8_e5m2", 12, N)
    of_lhs, of_rhs = (random.uniform(0.5, 2, 4).astype("f") for _ in range(2))
    scales: Any = {"scaling_mode": mode, "lhs_scale_inv": of_lhs, "rhs_scale_inv": of_rhs}
    scales = {name: x if isinstance(x, str) else jnp.asarray(x) for name, x in scales.items()}
    call = lambda *operands, **options: grouped_gemm(
        *map(jnp.asarray, operands), implementation=implementation, **scales, **options
    )
    wide = {"preferred_element_type": jnp.float32}
    scale = (np.float64(of_lhs) * of_rhs)[:, None, None]
    close(call(lhs, rhs, sizes, **wide), products(lhs_values, rhs_values * scale, sizes), "float32")
    got = call(lhs, dy, sizes, contracting_dims=ROWS, **wide)
    close(got, products_of_rows(lhs_values, dy_values, sizes) * scale, "float32")
    assert call(lhs, rhs, sizes).dtype == jnp.bfloat16


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
        (
            [3, 2],
            r"group_sizes\[1\] is 2, so that the groups up to it have 5 rows, but there are 4",
        ),
        ([-1, 2], r"group_sizes\[0\] is -1, but a group has at least 0 rows\. Pass"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"grouped_gemm: {message}"):
            grouped_gemm(lhs, rhs, jnp.array(sizes, np.int32)).block_until_ready()
    equal(grouped_gemm(lhs, rhs, jnp.array([4, 0])), np.full((4, N), K))
    assert grouped_gemm(lhs, rhs[..., :0], jnp.array([4, 0])).shape == (4, 0)
