"""The benchmarks of one GPU, on a CPU; of attention also workloads and expected results."""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import masked_attention, masked_attention_gradients
from in_ci import in_ci

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import attention_peers as peers  # pyright: ignore[reportMissingImports]
import attention_workloads as workloads  # pyright: ignore[reportMissingImports]
import device_trace  # pyright: ignore[reportMissingImports]
import gpu_attention  # pyright: ignore[reportMissingImports]
import gpu_exchange  # pyright: ignore[reportMissingImports]
import gpu_gemm  # pyright: ignore[reportMissingImports]
import gpu_profile  # pyright: ignore[reportMissingImports]
from device_trace import Kernel  # pyright: ignore[reportMissingImports]

HEADS = workloads.Heads(4, 2, 8, 4)
WORKLOADS = {
    "documents": lambda tokens: workloads.documents(tokens, 10, HEADS),
    "placed": lambda tokens: workloads.placed(tokens, HEADS),
    "shared prefix": lambda tokens: workloads.shared_prefix(tokens, HEADS),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_expected_results_equal_numpy(name):
    of = WORKLOADS[name](32)
    q, k, v, dout = of.operands()
    out, lse = masked_attention(q, k, v, of.visible[None])
    gradients = masked_attention_gradients(q, k, v, of.visible[None], dout, np.zeros(lse.shape))
    actual = workloads.expected(q, k, v, dout, of.visible)
    for name, wanted in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        np.testing.assert_allclose(actual[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["documents", "placed"])
def test_segments_say_what_is_visible(name):
    """As FlashAttention reads them: the last query of each sees its last key."""
    of = WORKLOADS[name](512)
    assert of.segments is not None and len(of.segments) > 1
    visible, row, first = np.zeros_like(of.visible), 0, 0
    for queries, keys in of.segments:
        for i in range(queries):
            visible[row + i, first : first + keys - queries + i + 1] = True
        row, first = row + queries, first + keys
    np.testing.assert_array_equal(visible, of.visible)


def test_completions_see_the_prompt_and_themselves():
    of = WORKLOADS["shared prefix"](64)
    sees = lambda i: np.flatnonzero(of.visible[i]).tolist()
    assert sees(7) == [*range(8)]  # the last token of the prompt
    assert sees(10) == [*range(8), 8, 9, 10] and sees(12) == [*range(8), 12]
    assert sees(32) == [32]  # the next prompt


def test_errors_leave_out_keys_that_no_query_sees():
    column = lambda *values: jnp.asarray(values, jnp.float32).reshape(1, -1, 1, 1)
    wanted = {"out": column(2), "dk": column(1, 1, 0)}
    results = {"out": column(3), "dk": column(2, 1, 9)}
    errors = workloads.relative_errors(results, wanted, jnp.asarray([[True, True, False]]))
    np.testing.assert_allclose([errors["out"], errors["dk"]], [0.5, np.sqrt(0.5)], rtol=1e-6)


@in_ci
def test_every_workload_is_measured_and_every_failure_has_a_reason(tmp_path, monkeypatch):
    output = tmp_path / "attention.json"
    sizes = "--tokens 64 --documents 10 --heads 2 1 --size 8 --variants --repeats 1"
    names = "--implementations ours flash_attention_3 jax_nn_xla"
    command = ["gpu_attention.py", *sizes.split(), *names.split(), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        gpu_attention.main()
    assert ended.value.code == 1  # the profile needs a GPU
    rows = json.loads(output.read_text())["rows"]
    *rows, profile = rows
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


@in_ci
@pytest.mark.parametrize(
    "program, sizes, failures",
    [
        (gpu_exchange, "--bytes 2097152", []),
        (gpu_gemm, "--size 64", []),
        (gpu_profile, "--size 64 --bytes 1048576", ["profile"]),  # which needs a GPU
    ],
)
def test_programs_of_one_gpu_run_by_xla(program, sizes, failures, tmp_path, monkeypatch):
    output = tmp_path / "rows.json"
    options = f"{sizes} --implementation xla --repeats 1 --output {output}"
    monkeypatch.setattr(sys, "argv", [program.__file__, *options.split()])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == bool(failures)
    rows = json.loads(output.read_text())["rows"]
    assert [row["what"] for row in rows if "error" in row] == failures and len(rows) > 2


def test_wrong_results_of_this_package_fail(monkeypatch):
    wrong = lambda of: (lambda q, k, v, _: 2 * jnp.einsum("btnh,bskh->btnh", q, k)[..., :4], ())
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "ours", wrong)
    measurement = gpu_attention.Measurement(WORKLOADS["documents"](16), ["ours"])
    with pytest.raises(RuntimeError, match=r"relative errors .* above"):
        list(measurement.rows(1))


def test_the_profile_tells_own_kernels_from_others(monkeypatch):
    own, other = "void cpd::(anonymous namespace)::AttendKernel<128>(cpd::AttendCall)", "fusion"
    calls = gpu_attention.TRACED_CALLS
    kernels = [Kernel(own, "Stream #1", 0, 2e6 * calls), Kernel(other, "Stream #1", 9e6, 9.3e6)]
    trace = device_trace.Trace(kernels, {"attention 0": (0, 10e6)})
    monkeypatch.setattr(device_trace, "traced", lambda run, names: trace)
    measurement = gpu_attention.Measurement(WORKLOADS["documents"](16), ["ours"])
    measurement.runs["ours", "forward"] = lambda: None
    (row,) = gpu_attention.profile([measurement])
    assert (row["own_kernels_ms"], row["device_ms"], row["kernels"]) == (2, 2.1, 0.7)
    assert row["longest"] == {own: 2, other: 0.1} and list(row["longest"]) == [own, other]


def test_overlap_of_kernels():
    exchange = [Kernel("push", "1", 0, 10), Kernel("push", "2", 5, 20)]
    product = [Kernel("gemm", "3", 8, 12), Kernel("gemm", "3", 30, 40)]
    assert device_trace.busy(exchange) == 20 and device_trace.busy(product) == 14
    assert device_trace.overlap(exchange, product) == 4
    trace = device_trace.Trace(exchange + product, {"here": (10, 40)})
    assert trace.within("here") == [exchange[1], *product]
    with pytest.raises(RuntimeError, match=r"4 kernels from 0 to 40, but none in 'later'"):
        trace._replace(windows={"later": (50, 60)}).within("later")
