"""Block scales as tensor cores read them: padded to whole tiles, in the order of bytes."""

import jax.numpy as jnp
import numpy as np
import pytest
import scaling_oracle as oracle

from jax_cp_dispatch.scaling import pad_scales, swizzle_scales, unpad_scales, unswizzle_scales

LAYOUTS = ["row", "column"]


def laid(x, layout):
    """Transposes blocks of the last dimension to the first one for "column"; its own inverse."""
    return np.asarray(x) if layout == "row" else np.asarray(x).T


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 4), (130, 9)])
def test_pad_scales_pads_with_zeros_and_unpad_scales_removes_them(shape, layout):
    scales = np.random.default_rng(0).integers(1, 255, shape).astype(np.uint8)
    padded = laid(pad_scales(jnp.asarray(laid(scales, layout)), layout=layout), layout)
    assert padded.shape == (-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4)
    np.testing.assert_array_equal(padded[: shape[0], : shape[1]], scales)
    assert np.sum(padded.astype(int)) == np.sum(scales.astype(int))
    np.testing.assert_array_equal(unpad_scales(jnp.asarray(padded), shape=shape), scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swizzle_scales_and_unswizzle_scales_follow_the_offset_formula(layout):
    shape = 256, 12
    scales = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    tiles = swizzle_scales(jnp.asarray(laid(scales, layout)), layout=layout)
    row, block = np.indices(shape)
    offset = oracle.tile_offset(row % 128, block % 4)
    np.testing.assert_array_equal(np.asarray(tiles)[row // 128, block // 4, offset], scales)
    back = unswizzle_scales(tiles, layout=layout)
    np.testing.assert_array_equal(laid(back, layout), scales)
