"""Benchmarks: pages show result files; what programs compare with is right; they run.

`.ci/run` runs all of them.
"""

import importlib
import json
import pathlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import placement_bounds as bounds
import pytest
from attention_oracle import masked_attention, masked_attention_gradients
from in_ci import in_ci
from jax.sharding import Mesh, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

peers, workloads, rules = map(
    importlib.import_module, ("attention_peers", "attention_workloads", "published_rules")
)
gpu_attention, gpu_exchange, gpu_gemm, gpu_profile = map(
    importlib.import_module, ("gpu_attention", "gpu_exchange", "gpu_gemm", "gpu_profile")
)
device_trace, pages, run_all, summary, tables = map(
    importlib.import_module, ("device_trace", "pages", "run_all", "summary", "tables")
)
Kernel = device_trace.Kernel

# ---- Result files and pages.

RESULTS = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("results/*.json")}


def test_each_program_writes_one_result_file_of_its_name():
    programs = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(RESULTS) == programs
    assert set(tables.VIEWS) == programs - {"predicted_attention", "exchange"}  # a picture, rates
    assert {of.__name__ for of in summary.LINES} | set(summary.SENTENCES) <= programs


def test_pages_show_the_results():
    for path, text in pages.pages().items():
        assert path.read_text() == text, "run python benchmarks/pages.py"


def test_results_may_lack_rows(tmp_path):
    """Keeps every second row, or none, of one file."""
    for rows in (slice(0, None, 2), slice(0, 0)):
        for name, result in RESULTS.items():
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps({**result, "rows": result["rows"][rows]}))
            readme, page = pages.pages(tmp_path).values()
            section = readme.split(pages.BEGIN)[1].split(pages.END)[0]
            assert page.startswith("# Benchmarks\n") and "all tables" in section
            file.unlink()


def test_a_benchmark_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(run_all, "run", lambda name, *_: ran.append(name) or name != "latency")
    monkeypatch.setattr(sys, "argv", ["run_all", "--quick", "--folder", str(tmp_path)])
    assert run_all.main() == 1
    assert ran == run_all.NAMES
    assert "failed: latency\n" in capsys.readouterr().err


# ---- The published rules, against counts by hand.


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_zigzag(num_ranks):
    """Deals the tokens of each document out, one by one."""
    lengths = np.random.default_rng(num_ranks).integers(1, 200, 20).tolist()
    owner = [*range(num_ranks), *reversed(range(num_ranks))]  # of each chunk
    pairs, tokens = [0] * num_ranks, [0] * num_ranks
    for length in lengths:
        padded = -(-length // len(owner)) * len(owner)
        for position in range(padded):
            rank = owner[position * len(owner) // padded]
            tokens[rank] += 1
            pairs[rank] += position + 1 if position < length else 0
    found = rules.zigzag(lengths, num_ranks)
    assert found.pairs.tolist() == pairs and found.tokens.tolist() == tokens
    between = int(num_ranks > 8)  # all keys go to all other ranks, in a node or between nodes
    assert found.received[:, between].tolist() == [(num_ranks - 1) * x for x in tokens]
    assert not found.received[:, 1 - between].any()
    np.testing.assert_array_equal(found.sent, found.received)


def test_hybrid_puts_documents_off_that_unbalance_a_round():
    """Loads are squares: 104 and 100 differ by less than 5 %; of 125 and 100, 25 comes later."""
    (found,) = rules.hybrid([10, 10, 2], 2, 10)
    assert found.tokens.tolist() == [12, 10]
    first, second = rules.hybrid([10, 5, 10], 2, 10)
    assert first.tokens.tolist() == [10, 10]
    assert second.tokens.tolist() == [4, 4]  # on both ranks


def test_hybrid_balances_any_costs():
    """The square of 8 is that of four documents of 4, which have twice its tokens."""
    (found,) = rules.hybrid([8, 4, 4, 4, 4], 2, 8)
    assert found.tokens.tolist() == [8, 16]
    (found,) = rules.hybrid([8, 4, 4, 4, 4], 2, 8, lambda length, ranks: length / ranks)
    assert found.tokens.tolist() == [12, 12]


def test_every_rule_computes_each_pair_once(monkeypatch):
    """Also with any parts of blocks: the partitioner is not installed everywhere."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 400, 60).tolist()
    random = lambda nets, moved, weights, most: draw.integers(0, len(most), len(weights))
    monkeypatch.setattr(rules, "_parts_of_hypergraph", random)
    groups = lambda rule: [rules.in_groups(lengths, 16, 4, rule)]
    mixed = partial(rules.whole_or_zigzag, limit=200, cost=float)
    found = {
        "zigzag": [rules.zigzag(lengths, 16)],
        "groups": groups(rules.zigzag),
        "whole": [rules.whole(lengths, 16, float)],
        "whole or zigzag": groups(mixed),
        "hybrid": rules.hybrid(lengths, 16, 50),
        "blocks": [rules.blocks(lengths, 16, 64)],
    }
    for name, rounds in found.items():
        assert sum(x.pairs.sum() for x in rounds) == sum(x * (x + 1) // 2 for x in lengths), name
        assert sum(x.tokens.sum() for x in rounds) >= sum(lengths), name  # padding
        for x in rounds:
            assert len(x.pairs) == len(x.tokens) == len(x.sent) == len(x.received) == 16
            assert x.sent.sum() == x.received.sum()
    assert found["whole"][0].tokens.sum() == sum(lengths)


def test_blocks_move_what_pairs_on_other_ranks_need(monkeypatch):
    """Two documents of 3 and 1 blocks over 2 ranks; the last rows of pairs are on the other one."""
    graph = rules.BlockGraph([10, 3], 4)
    assert graph.tokens.tolist() == [4, 4, 2, 3]
    assert list(zip(graph.q.tolist(), graph.k.tolist(), graph.pairs.tolist(), strict=True)) == [
        *((0, 0, 10), (1, 0, 16), (1, 1, 10)),
        *((2, 0, 8), (2, 1, 8), (2, 2, 3), (3, 3, 6)),
    ]
    parts = np.array([0, 0, 1, 1, *(0, 0, 0, 1, 1, 1, 0)])  # of blocks, then of their pairs
    monkeypatch.setattr(rules, "_parts_of_hypergraph", lambda *_: parts)
    found = rules.blocks([10, 3], 2, 4)
    assert found.pairs.tolist() == [42, 19] and found.tokens.tolist() == [8, 8]
    # Rank 1 needs the keys of blocks 0 and 1; rank 0 those of block 3, whose queries come and go.
    assert found.sent[:, 0].tolist() == [8 + 6, 3 + 6]
    assert found.received[:, 0].tolist() == [3 + 6, 8 + 6]


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_receives_less_than_the_bound(seed):
    """Random runs of tokens on random ranks, and on nodes of two: [W, T] says who holds what."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 60, 3).tolist()
    documents = []
    for length in lengths:
        runs = np.cumsum(draw.random(length) < draw.choice([0.05, 0.5]))
        documents.append(draw.integers(0, 4, runs[-1] + 1)[runs] == np.arange(4)[:, None])
    for size in (1, 2):
        received, tokens, pairs = np.zeros((3, 4), int)
        for held in documents:
            in_node = np.repeat(held.reshape(4 // size, size, -1).any(1), size, axis=0)
            seen = held[:, ::-1].cumsum(1)[:, ::-1] > 0  # up to the last token that the rank holds
            received += (seen & ~in_node).sum(1)
            tokens += in_node.sum(1)
            pairs += (in_node * np.arange(1, held.shape[1] + 1)).sum(1)
        bound = bounds.least_received_by_the_busiest(lengths, tokens.max(), pairs.max())
        assert bound <= received.max()


# ---- Programs of one GPU, on a CPU; of attention also workloads and expected results.

HEADS = workloads.Heads(4, 2, 8, 4)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs a program with options; returns its exit code, and the rows of its file."""

    def run(program, options):
        output = tmp_path / "rows.json"
        options = f"{options} --repeats 1 --output {output}"
        monkeypatch.setattr(sys, "argv", [program.__file__, *options.split()])
        with pytest.raises(SystemExit) as ended:
            program.main()
        return ended.value.code, json.loads(output.read_text())["rows"]

    return run


def test_expected_results_equal_numpy():
    of = workloads.placed(32, HEADS)
    q, k, v, dout = of.operands()
    out, lse = masked_attention(q, k, v, of.visible[None])
    gradients = masked_attention_gradients(q, k, v, of.visible[None], dout, np.zeros(lse.shape))
    actual = workloads.expected(q, k, v, dout, of.visible)
    for name, wanted in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        np.testing.assert_allclose(actual[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [partial(workloads.documents, length=10), workloads.placed])
def test_segments_say_what_is_visible(make):
    """As FlashAttention reads them: the last query of each sees its last key."""
    of = make(512, heads=HEADS)
    assert of.segments is not None and len(of.segments) > 1
    row, first, blocks = 0, 0, np.zeros_like(of.visible)
    for queries, keys in of.segments:
        blocks[row : row + queries, first : first + keys] = np.tri(queries, keys, keys - queries)
        row, first = row + queries, first + keys
    np.testing.assert_array_equal(blocks, of.visible)


def test_completions_see_the_prompt_and_themselves():
    of = workloads.shared_prefix(64, HEADS)
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
def test_every_workload_is_measured_and_every_failure_has_a_reason(results):
    sizes = "--tokens 64 --documents 10 --heads 2 1 --size 8 --variants"
    names = "--implementations ours flash_attention_3 jax_nn_xla"
    code, (*rows, profile) = results(gpu_attention, f"{sizes} {names}")
    assert code == 1  # the profile needs a GPU
    assert profile["error"].startswith("RuntimeError: the profile has 0 kernels")
    ours = [row["path"] for row in rows if row["implementation"] == "ours"]
    assert ours == ["blockwise"] * 6
    for row in rows:
        errors = [value for name, value in row.items() if name.startswith("error_")]
        if why := row.get("not_measured"):
            assert row["implementation"] == "flash_attention_3"
            assert "128" in why or "keys of their own" in why
        else:
            assert row["ms"] > 0 and len(errors) in (1, 4) and all(0 < x < 0.02 for x in errors)


def on_devices(call, x, w):
    """Runs `run_all_ranks` of gpu_gemm on CPU devices, by the public function of the same call."""
    of_rank = all_gather_matmul if call.overlap.gathers else matmul_reduce_scatter
    multiply = partial(of_rank, axis_name="tp", method=call.overlap.method)
    ranks, mesh = P("tp"), Mesh(np.array(jax.devices()[: len(x)]), ("tp",))
    each = lambda x, w: multiply(x[0], w[0])[None]
    return jax.shard_map(each, mesh=mesh, in_specs=(ranks, ranks), out_specs=ranks)(x, w)


@in_ci
@pytest.mark.parametrize(
    "program, options, failures",
    [
        (gpu_exchange, "--bytes 2097152 --implementation xla", []),
        (gpu_gemm, "--size 64 --implementation in_process", []),
        # The profile needs a GPU.
        (gpu_profile, "--size 64 --bytes 1048576 --implementation xla", ["profile"]),
    ],
)
def test_programs_of_one_gpu_run_without_one(program, options, failures, results, monkeypatch):
    monkeypatch.setattr(gpu_gemm, "run_all_ranks", on_devices)
    code, rows = results(program, options)
    assert code == bool(failures)
    assert [row["what"] for row in rows if "error" in row] == failures and len(rows) > 2


def test_wrong_results_of_this_package_fail(monkeypatch):
    wrong = lambda of: (lambda q, k, v, _: 2 * jnp.einsum("btnh,bskh->btnh", q, k)[..., :4], ())
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "ours", wrong)
    measurement = gpu_attention.Measurement(workloads.documents(16, 10, HEADS), ["ours"])
    with pytest.raises(RuntimeError, match=r"relative errors .* above"):
        list(measurement.rows(1))


def test_the_profile_tells_own_kernels_from_others(monkeypatch):
    own, other = "void cpd::(anonymous namespace)::AttendKernel<128>(cpd::AttendCall)", "fusion"
    calls = gpu_attention.TRACED_CALLS
    kernels = [Kernel(own, "Stream #1", 0, 2e6 * calls), Kernel(other, "Stream #1", 9e6, 9.3e6)]
    trace = device_trace.Trace(kernels, {"attention 0": (0, 10e6)})
    monkeypatch.setattr(device_trace, "traced", lambda run, names: trace)
    measurement = gpu_attention.Measurement(workloads.documents(16, 10, HEADS), ["ours"])
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
