"""Each result file as a section of docs/benchmarks.md: a text, a table, where it was measured."""

import json
import pathlib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]


def load(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def origin(result: dict) -> str:
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores; jax {versions['jax']}, Python "
        f"{versions['python']}; {result['date']}"
    )


def section(text: str, columns: str, rows: Iterable[Iterable[object]], result: dict) -> list[str]:
    """A text, a table, and where its numbers come from; columns apart by `|`, words in <>."""
    names = [name.strip() for name in columns.split("|")]
    return [
        text,
        "",
        cells(*(name.strip("<>") for name in names)),
        "|" + "|".join("---" if name.startswith("<") else "---:" for name in names) + "|",
        *(cells(*row) for row in rows),
        "",
        f"({origin(result)})",
    ]


def movement() -> list[str]:
    result = load("dispatch")
    return section(
        f"**Movement.** One {result['title']} (4096 tokens per rank, 16 heads × 128, bfloat16, "
        "random segments), interleaved medians. The process keeps freed memory "
        "(`start_cpu_devices`); if that is forbidden, a fresh window comes in huge pages: 0.98 to "
        "1.1 of memcpy.",
        "<> | ms | GB/s | of memcpy",
        ((row["what"], row["ms"], row["GB_per_s"], row["of_memcpy"]) for row in result["rows"]),
        result,
    )


def latency() -> list[str]:
    result = load("latency")
    names = ("devices", "what", "loop_us", "trace_ms", "call_returns_us", "call_done_us")
    return section(
        f"**Latency.** {result['title']}, medians: one operation inside `lax.scan`; tracing a new "
        "function that holds one; and one call of a compiled program that holds one, until it "
        "returns and until its result is there. The last operation adds 1 and moves nothing.",
        "devices | <> | in a loop µs | tracing ms | call returns µs | result µs",
        ([row[name] for name in names] for row in result["rows"]),
        result,
    )


def growth() -> list[str]:
    result = load("growth")

    def cells_of(row: dict) -> list[object]:
        timed = [
            f"{row[f'{name}_{unit}']:.2f}"
            for name in ("donated", "fresh", "ppermute")
            for unit in ("ms", "GB_per_s")
        ]
        return [row["bytes_per_rank"] // 1024, row["devices"], *timed, f"{row['memcpy_ms']:.2f}"]

    return section(
        "**Growth.** A fixed payload per rank, an equal part of it to every rank, in one program; "
        "`ppermute` moves as much to one neighbour. GB/s of all ranks together, interleaved "
        "medians.",
        "KiB per rank | devices | donated window ms | GB/s | fresh window ms | GB/s | ppermute ms "
        "| GB/s | memcpy ms",
        map(cells_of, result["rows"]),
        result,
    )


def metadata() -> list[str]:
    result = load("metadata")

    def cells_of(row: dict) -> list[str]:
        sizes = f"{row['world_size']} × {row['num_shards']}"
        memory = f"{row['temp_bytes'] / 1e6:.1f}"
        times = f"{row['ms']:.2f}", f"{row['numpy_ms']:.2f}", f"{row['compile_s']:.1f}"
        return [sizes, *times, memory]

    return section(
        "**Planning metadata.** `compute_metadata`, `compute_metadata_kv` and "
        "`compute_attn_layout_seqlens` in one program, 8 replicas, against the same in vectorised "
        "NumPy int64, interleaved medians.",
        "<ranks × slots> | ms | NumPy ms | compile s | extra memory MB",
        map(cells_of, result["rows"]),
        result,
    )


def balance() -> list[str]:
    result = load("planner")
    published = load("planner_published_lengths")

    def cells_of(row: dict) -> list[object]:
        work = f"{row['imbalance_before']:.2f}", f"{row['imbalance']:.3f}"
        moved = f"{row['q_moved_share']:.2f}", f"{row['kv_moved_share']:.2f}"
        return [row["lengths"], row["world_size"], *work, *moved, row["plan_ms"]]

    return section(
        "**Balanced attention plans.** 64K tokens per rank, blocks of 128; work is query-key pairs "
        "per rank, max/mean; moved tokens as a share of all tokens (an all-gather of keys moves "
        "ranks - 1). "
        "Lengths drawn from a log-normal distribution, and from two published ones "
        "(`hao-ai-lab/distca`, `distca/simulator/data`; `bench_planner.py --lengths FILE...`).",
        "<lengths> | ranks | work before | after | q moved | kv moved | planning ms",
        map(cells_of, [*result["rows"], *published["rows"]]),
        result,
    )


def attention(images: str = "images") -> list[str]:
    """With a picture from the folder `images`, as the page that shows it names it."""
    result = load("attention")
    rows = result["rows"]
    columns = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_place = {(row["method"], row["case"], row["dtype"]): row for row in rows}

    def cell(method: str, column: tuple[str, str]) -> str:
        row = by_place.get((method, *column))
        if row is None or "ms" not in row:
            return "–" if row is None else row["why_not"]
        text = f"{row['ms']:.0f} ({row['of_matmul']:.2f})"
        return f"**{text}**" if row["chosen"] else text

    table = section(
        f"**Attention.** {rows[0]['tokens']} tokens over 8 virtual devices, 8 heads of 64, forward "
        "and backward: ms, and the rate, counted on the pairs that the mask lets through, as a "
        "share of a matrix product's. Interleaved medians; **bold**: what `choose_algorithm` says. "
        "`ringattention` is the PyPI package 0.1.2, its `jax.lib.xla_bridge` repaired.",
        " | ".join(["<>", *(f"{case}, {dtype}" for case, dtype in columns)]),
        ([method, *(cell(method, column) for column in columns)] for method in methods),
        result,
    )
    ratios = {
        other: " and ".join(
            f"{by_place[other, *column]['ms'] / by_place['zigzag', *column]['ms']:.1f}"
            for column in columns
            if column[0] == "causal"
        )
        for other in ("jax.nn sharded", "ringattention")
    }
    grown = load("attention_growth")
    peak = {row["method"]: row["peak_MB"] for row in grown["rows"] if row["tokens"] == 8192}
    summary = (
        "Causal, in float32 and bfloat16: `zigzag` is {} times as fast as the sharded dense way, "
        "{} times as fast as `ringattention`; in float32 it needs {:.3f} of the dense way's "
        "memory. On an AMD EPYC of 2 cores (2026-11-21): 4.5 and 4.6, 1.9 and 2.0 times."
    ).format(*ratios.values(), peak["zigzag"] / peak["jax.nn sharded"])
    picture = f"![Time and memory of attention]({images}/attention_growth.svg)"
    return [*table, "", summary, "", picture, "", f"({origin(grown)})"]


def local_attention() -> list[str]:
    result = load("local_attention")

    def cells_of(row: dict) -> list[object]:
        what = f"{row['case']}, {row['dtype']}", row["pass"].replace("_", " and ")
        dense = f"{row['times_faster']} ×" if "times_faster" in row else "–"
        return [*what, row["seconds"], row["share_of_float32_matmul"], dense]

    return section(
        "**Local attention**, one device, 8192 tokens, 8 heads of 64: one causal document, "
        "documents of 1024 tokens, and all keys for all queries. Counted FLOPs as a share of the "
        "rate of a float32 matrix product; and how many times faster than "
        "`jax.nn.dot_product_attention` with a mask. On an "
        "AMD EPYC (2026-11-21), whose products take twice as long, one KV head at a time: 0.65 of "
        "their rate for one causal document, forward and backward, float32; packed, 36 times the "
        "speed of the dense way.",
        "<> | <> | seconds | of matmul | of the dense way",
        map(cells_of, result["rows"]),
        result,
    )


def comm_gemm() -> list[str]:
    result = load("comm_gemm")
    products: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        key = row["devices"], row["dtype"], row["layer"]
        products.setdefault(key, {})[row["what"]] = row

    def cells_of(key: tuple, rows: dict[str, dict]) -> list[object]:
        xla, auto = rows["xla"], rows["auto"]
        share = f"{100 * xla['communication_share']:.0f} %"
        of_xla = lambda name: f"{rows[name]['of_xla']:.2f}" if name in rows else "–"
        best = max(row["of_xla"] for name, row in rows.items() if name not in ("xla", "auto"))
        return [
            *key,
            *(xla["ms"], xla["bound_ms"], share),
            *map(of_xla, ("none", "ring direct", "ring", "ring pairs", "pipeline 2")),
            f"{auto['of_xla']:.2f} ({auto['chosen']}; best {best:.2f})",
        ]

    return section(
        "**Overlapped GEMMs**, tensor-parallel products of a Llama-like layer (4096 tokens, model "
        "size 1024), forward. XLA's way is `all_gather`, then the product, or the product, then "
        "`psum_scatter`; the bound is the longer of its two parts, and their share is that of "
        'communication. Speed of each method over XLA\'s way (more than 1 is faster); "auto" '
        "follows a table that `tune` measured before. The copies of ring, pairs and pipeline, and "
        "their float32 partial sums, cost the cores that multiply; a direct ring has neither.",
        "devices | <dtype> | <> | XLA's ms | bound | communication | none | ring direct | ring "
        "| pairs | pipeline 2 | <auto>",
        (cells_of(key, rows) for key, rows in products.items()),
        result,
    )


def scaling() -> list[str]:
    result = load("scaling")

    def cells_of(row: dict) -> list[object]:
        share = row["of_bfloat16_bytes"]
        return [
            *(row["layer"], row["pass"], row["mode"], row["ms"], f"{row['of_bfloat16']:.2f}"),
            row["arriving_MiB"] or "–",
            "–" if share is None else f"{share:.3f}",
            f"{row['error']:.1e}",
            f"{row['error_of_spread_tokens']:.1e}",
        ]

    return section(
        f"**Scaling modes** on {result['rows'][0]['devices']} virtual devices, ring, bfloat16 "
        "operands (4096 tokens, model size 1024, 2816 hidden). The CPU widens 8 bits before it "
        "multiplies, so fewer bytes move, and the product is no faster. Error of the result, "
        "relative to float64's, of a token; and where tokens differ in magnitude by up to 2²⁰. A "
        "reduce-scatter's sums are float32 whatever the mode: what arrives is its gradient.",
        "<layer> | <> | <mode> | ms | speed over bfloat16 | MiB arriving | of bfloat16's | error "
        "| of spread tokens",
        map(cells_of, result["rows"]),
        result,
    )


def exchange() -> list[str]:
    result = load("exchange")
    ours, xla = (
        [row for row in result["rows"] if row["implementation"] == name]
        for name in ("in_process", "xla")
    )

    def cells_of(a: dict, b: dict) -> list[object]:
        what = a["devices"], a["bytes_per_rank"] // 1024, a["what"]
        return [*what, a["us"], a["GB_per_s"], a["of_memcpy"], b["us"], b["GB_per_s"]]

    return section(
        "**Exchanges of ring and Hamilton attention**, inside `lax.scan`: this package's transport "
        "(`in_process`) and XLA's collectives, GB/s of all ranks together and share of memcpy.",
        "devices | KiB per rank | <> | in_process µs | GB/s | of memcpy | xla µs | GB/s",
        map(cells_of, ours, xla),
        result,
    )


def processes() -> list[str]:
    result = load("processes")
    names = ("processes", "MB", "what", "ms", "of_memcpy", "times_gloo")
    return section(
        "**Between processes of one host**, a device each: rows of 8 kB in random segments, "
        "through shared memory and with gloo's collectives; the last column is the speed over the "
        "faster of gloo's two ways. A fresh window of 32 MB and more per process has new pages in "
        "every call, huge ones: 0.26 to 0.84 of memcpy in five runs. Donated: 0.52 to 0.83.",
        "processes | MB | <> | ms | of memcpy | of gloo",
        ([row[name] for name in names] for row in result["rows"]),
        result,
    )


ALL = (
    *(attention, local_attention, comm_gemm, scaling, exchange),
    *(movement, processes, latency, growth, metadata, balance),
)
