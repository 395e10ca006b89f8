"""The profile of an exchange beside a product: its programs on a CPU, and made-up kernels."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import device_trace  # pyright: ignore[reportMissingImports]
import gpu_profile  # pyright: ignore[reportMissingImports]
from device_trace import Kernel  # pyright: ignore[reportMissingImports]

PUSH = "void cpd::(anonymous namespace)::PushKernel<cpd::Mapped>(cpd::Call)"
PRODUCT = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT"


def test_every_program_delivers_the_rows_and_the_product():
    programs = gpu_profile.Programs(size=16, num_bytes=1 << 19, implementation="xla")
    for run in programs.together().values():
        rows, product = run()
        programs.check((rows, product))
        assert (product == programs.x @ programs.w).all()
        with pytest.raises(RuntimeError, match="other rows"):
            programs.check((jax.tree.map(lambda x: x[::-1], rows), product))


def test_rows_say_how_much_of_the_exchange_lies_beside_the_product():
    calls = gpu_profile.CALLS
    kernels = [Kernel(PUSH, "Stream #20", 0, 4e3 * calls),
               Kernel(PRODUCT, "Stream #13", 1e3 * calls, 9e3 * calls),
               Kernel("loop_add_fusion", "Stream #13", 9e3 * calls, 10e3 * calls)]  # fmt: skip
    row = gpu_profile.overlap_row(kernels)
    assert (row["exchange_us"], row["product_us"], row["beside_us"]) == (4, 8, 3)
    assert row["share_beside"] == 0.75
    assert (row["exchange_streams"], row["product_streams"]) == (["Stream #20"], ["Stream #13"])
    assert row["exchange_kernels"] == {PUSH: 4} and row["other_kernels"] == {"loop_add_fusion": 1}


def test_a_profile_without_kernels_of_both_is_an_error():
    with pytest.raises(RuntimeError, match=r"no kernels of both .*Push"):
        gpu_profile.overlap_row([Kernel(PUSH, "Stream #20", 0, 1)])


@pytest.mark.parametrize("name", [PUSH, "_ZN3cpd12_GLOBAL__N_110PlanKernelE"])
def test_names_of_own_kernels(name):
    assert device_trace.OWN_KERNEL.search(name) and not device_trace.OWN_KERNEL.search(PRODUCT)
