"""Unsupported operands and derivatives of GEMMs: errors name the function that was called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cp_dispatch import all_gather_matmul, gemm, grouped_gemm, matmul_reduce_scatter

pytestmark = pytest.mark.usefixtures("unchecked_types")
X, W, SIZES = jnp.ones((8, 4)), jnp.ones((4, 8)), jnp.array([3, 5])


def mesh():
    return jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def gather(x, w, **options):
    return all_gather_matmul(x, w, axis_name="tp", mesh=mesh(), **options)


def scatter(x, w, **options):
    return matmul_reduce_scatter(x, w, axis_name="tp", mesh=mesh(), **options)


def grouped(x, w, **options):
    return grouped_gemm(x, jnp.stack([w, w]), SIZES, **options)


PRODUCTS = {
    "all_gather_matmul": gather,
    "matmul_reduce_scatter": scatter,
    "gemm": gemm,
    "grouped_gemm": grouped,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_mode(name):
    product = PRODUCTS[name]
    of_x = lambda x: product(x, W)
    loss = lambda x: (of_x(x) ** 3).sum()
    message = rf"^{name}: got forward mode .* a Hessian is jax\.jacrev\(jax\.grad"
    with pytest.raises(TypeError, match=message):
        jax.jvp(of_x, (X,), (X,))
    with pytest.raises(TypeError, match=message):
        jax.jacfwd(of_x)(X)
    x = np.random.default_rng().integers(-2, 3, X.shape).astype(np.float32)
    second = jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    y = x @ np.asarray(W)  # d/dx sum(3 y^2 W') = 6 y (sum of W over K) W'
    np.testing.assert_allclose(second, (6 * y * np.asarray(W).sum(0)) @ np.asarray(W).T)


@pytest.mark.parametrize("operand", ["x", None, [[1.0, 2.0], [1.0]]])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_that_are_not_arrays(name, operand):
    with pytest.raises(
        TypeError, match=rf"^{name}: (x|lhs) is .*; it needs to be an array, or nes"
    ):
        PRODUCTS[name](operand, W)


@pytest.mark.parametrize("name", PRODUCTS)
def test_lists_are_arrays(name):
    np.testing.assert_array_equal(PRODUCTS[name](np.asarray(X).tolist(), W), X @ W)


@pytest.mark.parametrize("name", PRODUCTS)
def test_unknown_dtypes(name):
    message = rf"^{name}: preferred_element_type is 'foo' for operands of float32; it needs to be"
    with pytest.raises(TypeError, match=message):
        PRODUCTS[name](X, W, preferred_element_type="foo")


def test_zero_features():
    """Zero contracted elements give zeros; zero columns give an empty result."""
    for product in PRODUCTS.values():
        assert not np.asarray(product(jnp.ones((8, 0)), jnp.ones((0, 8)))).any()
        assert product(X, jnp.ones((4, 0))).shape == (8, 0)
