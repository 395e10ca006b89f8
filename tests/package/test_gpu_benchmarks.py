"""The benchmarks of one GPU, on a CPU: expected results, rows, and the overlap of kernels."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from attention_oracle import masked_attention, masked_attention_gradients

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import attention_peers as peers  # pyright: ignore[reportMissingImports]
import attention_workloads as workloads  # pyright: ignore[reportMissingImports]
import device_trace  # pyright: ignore[reportMissingImports]
import gpu_attention  # pyright: ignore[reportMissingImports]
import gpu_profile  # pyright: ignore[reportMissingImports]
from device_trace import Kernel  # pyright: ignore[reportMissingImports]

HEADS = workloads.Heads(4, 2, 8, 4)
WORKLOADS = {
    "documents": lambda tokens: workloads.documents(tokens, 10, HEADS),
    "placed": lambda tokens: workloads.placed(tokens, HEADS),
    "shared prefix": lambda tokens: workloads.shared_prefix(tokens, HEADS),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_expected_results_of_attention_equal_numpy(name):
    of = WORKLOADS[name](32)
    q, k, v, dout = of.operands()
    out, lse = masked_attention(q, k, v, of.visible[None])
    gradients = masked_attention_gradients(q, k, v, of.visible[None], dout, np.zeros(lse.shape))
    actual = workloads.expected(q, k, v, dout, of.visible)
    for name, wanted in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        np.testing.assert_allclose(actual[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["documents", "placed"])
def test_segments_of_other_libraries_say_what_is_visible(name):
    """As FlashAttention reads them: the last query of each sees its last key."""
    of = WORKLOADS[name](512)
    visible, row, first = np.zeros_like(of.visible), 0, 0
    for queries, keys in of.segments:
        for i in range(queries):
            visible[row + i, first : first + keys - queries + i + 1] = True
        row, first = row + queries, first + keys
    np.testing.assert_array_equal(visible, of.visible)


def test_every_workload_is_measured_and_every_failure_has_a_reason(tmp_path, monkeypatch):
    output = tmp_path / "attention.json"
    sizes = "--tokens 64 --documents 10 --heads 2 1 --size 8 --variants --repeats 1"
    names = "--implementations ours flash_attention_3 jax_nn_xla"
    command = ["gpu_attention.py", *sizes.split(), *names.split(), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        gpu_attention.main()
    assert ended.value.code == 1  # the profile needs a GPU
    *rows, profile = json.loads(output.read_text())["rows"]
    assert profile["error"].startswith("RuntimeError: the profile has 0 kernels")
    ours = [row for row in rows if row["implementation"] == "ours"]
    assert len(ours) == 6 and all(row["path"] == "blockwise" for row in ours)
    for row in rows:
        errors = [value for name, value in row.items() if name.startswith("error_")]
        if "not_measured" in row:
            assert row["implementation"] == "flash_attention_3"
            assert "128" in row["not_measured"] or "keys of their own" in row["not_measured"]
        else:
            assert row["ms"] > 0 and len(errors) in (1, 4) and all(0 < x < 0.02 for x in errors)


def test_wrong_results_of_this_package_fail(monkeypatch):
    wrong = lambda of: (lambda q, k, v, _: 2 * q[..., :4], ())
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "ours", wrong)
    measurement = gpu_attention.Measurement(WORKLOADS["documents"](16), ["ours"])
    with pytest.raises(RuntimeError, match=r"relative errors .* above"):
        list(measurement.rows(1))


def test_the_profiled_exchange_delivers_the_rows_and_the_product():
    programs = gpu_profile.Programs(size=16, num_bytes=1 << 19, implementation="xla")
    for run in programs.together().values():
        rows, product = run()
        programs.check((rows, product))
        with pytest.raises(RuntimeError, match="other rows"):
            programs.check((jax.tree.map(lambda x: x[::-1], rows), product))


def test_overlap_of_kernels():
    exchange = [Kernel("push", "1", 0, 10), Kernel("push", "2", 5, 20)]
    product = [Kernel("gemm", "3", 8, 12), Kernel("gemm", "3", 30, 40)]
    assert device_trace.busy(exchange) == 20 and device_trace.busy(product) == 14
    assert device_trace.overlap(exchange, product) == 4
    trace = device_trace.Trace(exchange + product, {"here": (10, 40)})
    assert trace.within("here") == [exchange[1], *product]
