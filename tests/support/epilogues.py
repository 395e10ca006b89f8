"""Operands of GEMMs with fused epilogues, all epilogues of a call, and what they are in NumPy."""

import jax.numpy as jnp
import numpy as np
from comm_gemm_cases import normal
from scaled_gemm_cases import E4M3, Scaled, drawn_by_ranks, gelu, gelu_derivative, near

from jax_cp_dispatch import gemm

WIDE = "NO_SCALING"


def draw(seed, num_ranks, mode, shape, layout="row") -> Scaled:
    """Operands whose products cover the range in which GELU bends, and beyond it."""
    if mode == WIDE:
        x = normal(seed, num_ranks, *shape) / np.float32(4)
        return Scaled(x, np.zeros((num_ranks, 1)), x.astype(np.float64))
    return drawn_by_ranks(seed, num_ranks, mode, E4M3, shape, layout, -9)


def scaled(lhs, rhs, mode, **options):
    """Returns the call and its operands: data and scales; without scaling, no scales."""

    def call(*operands, **more):
        a, a_scale, b, b_scale = map(jnp.asarray, operands)
        scales = {"lhs_scale_inv": a_scale, "rhs_scale_inv": b_scale}
        return gemm(a, b, scaling_mode=mode, **({} if mode == WIDE else scales), **options, **more)

    return call, (*lhs[:2], *rhs[:2])


def all_epilogues(call, bias, gelu_input, **options):
    """Returns the epilogues by name, computed from the complete sum."""
    return {
        "bias": call(bias=bias, **options),
        "gelu": call(fuse_gelu=True, **options),
        "bias, gelu": call(bias=bias, fuse_gelu=True, **options),
        "dgelu": call(fuse_gelu=True, grad=True, gelu_input=gelu_input, **options),
        "dgelu, dbias": call(
            fuse_gelu=True, fuse_bias=True, grad=True, gelu_input=gelu_input, **options
        ),
        "dbias": call(fuse_bias=True, grad=True, **options),
    }


def check_all(results, product, bias, gelu_input, rhs_sum, name):
    """The product in float64, [..., m, n], and `rhs_sum`, the sum of rhs over the contraction."""
    near(results["bias"], product + bias, name)
    out, pre = results["gelu"]
    near(pre, product, name)
    near(out, gelu(product), name)
    out, pre = results["bias, gelu"]
    near(pre, product + bias, name)
    near(out, gelu(product + bias), name)
    want = product * gelu_derivative(gelu_input)
    near(results["dgelu"], want, name)
    out, dbias = results["dgelu, dbias"]
    near(out, want, name)
    near(dbias, np.asarray(out).astype(np.float64).sum(-2), name)
    out, dbias = results["dbias"]
    near(out, product, name)
    near(dbias, rhs_sum, name)
