"""NumPy oracle of overlapped 8-bit GEMMs and their derivatives, in float64.

x and w are rounded to e4m3, dy to e5m2, or to e4m3 in blocks; the derivative of rounding is the
identity. Arrays have a leading rank axis; delayed scales are those of x, w and dy.
"""

from typing import Any

import comm_gemm_oracle as oracle
import numpy as np
import scaling_oracle
from scaled_gemm_cases import E4M3, E5M2, MXFP8

ONE = np.float32(1)
CURRENT: Any = {"x": None, "w": None, "dy": None}  # scales


def rounded(x, mode, name, *, scale=None, along=-1):
    """The values of x, of one rank, after rounding to 8 bits with a tensor scale or block scales.

    Without a scale, uses the one of the largest magnitude of x.
    """
    x = np.asarray(x).astype(np.float32)
    if mode == MXFP8:
        x = np.swapaxes(x, along, -1)
        data, scales = scaling_oracle.mxfp8(x.reshape(-1, x.shape[-1]), name)
        values = scaling_oracle.mxfp8_value(data, scales, name).reshape(x.shape)
        return np.swapaxes(values, along, -1)
    if scale is None:
        scale = scaling_oracle.tensor_scale(largest(x), name)
    inverse = (ONE / scale).astype(np.float64)
    return scaling_oracle.table(name)[scaling_oracle.tensor(x, scale, name)] * inverse


def largest(x):
    return np.max(np.abs(np.asarray(x).astype(np.float32)), initial=0)


def of_ranks(x, mode, name, *, scale=None, shared=False, along=-1):
    """Rounds each rank's array, with one scale per rank or one for all."""
    if shared and scale is None and mode != MXFP8:
        scale = scaling_oracle.tensor_scale(largest(x), name)
    return np.stack([rounded(each, mode, name, scale=scale, along=along) for each in x])


def gradient_type(mode):
    return E4M3 if mode == MXFP8 else E5M2


def all_gather_matmul(x, w, dy, mode, counts=None, scales=None, bias: Any = None):
    """(y, dx, dw, dbias)"""
    scales = scales or CURRENT
    x_of_ranks = of_ranks(real(x, counts), mode, E4M3, scale=scales["x"], shared=True)
    down = of_ranks(w, mode, E4M3, scale=scales["w"], along=-2)
    across = of_ranks(w, mode, E4M3, scale=scales["w"])
    dy_of_ranks = of_ranks(dy, mode, gradient_type(mode), scale=scales["dy"])
    y = oracle.all_gather_matmul(x_of_ranks, down, bias, counts)
    dx = oracle.all_gather_matmul_gradients(x_of_ranks, across, dy_of_ranks, counts)[0]
    _, dw, dbias = oracle.all_gather_matmul_gradients(x_of_ranks, w, dy, counts)
    return y, dx, dw, dbias


def matmul_reduce_scatter(x, w, dy, mode, counts=None, scales=None, bias: Any = None):
    """(y, dx, dw, dbias)"""
    scales = scales or CURRENT
    x_of_ranks = of_ranks(x, mode, E4M3, scale=scales["x"])
    down = of_ranks(w, mode, E4M3, scale=scales["w"], along=-2)
    across = of_ranks(w, mode, E4M3, scale=scales["w"])
    dy = real(dy, counts)
    dy_of_ranks = of_ranks(dy, mode, gradient_type(mode), scale=scales["dy"], shared=True)
    y = oracle.matmul_reduce_scatter(x_of_ranks, down, bias, counts)
    dx, dw, _ = oracle.matmul_reduce_scatter_gradients(x, across, dy_of_ranks, counts)
    dbias = oracle.matmul_reduce_scatter_gradients(x, w, dy, counts)[2]
    return y, dx, dw, dbias


def real(x, counts):
    """Zeroes the rows after each rank's own."""
    x = np.array(x)
    for rank, count in enumerate(counts or ()):
        x[rank][..., count:, :] = 0
    return x
