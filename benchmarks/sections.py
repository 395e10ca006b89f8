"""Renders each result file as a section of docs/benchmarks.md: a text, a table, its origin.

All numbers come from the result files. If rows are missing, texts that need them are omitted.
"""

from collections.abc import Callable, Iterable
from typing import Any

Result = dict[str, Any]
NONE = "–"


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def origin(result: Result) -> str:
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores; jax {versions['jax']}, Python "
        f"{versions['python']}; {result['date']}"
    )


def section(text: str, columns: str, rows: Iterable[Iterable[object]], result: Result) -> list[str]:
    """Returns a text, a table and its origin; `|` separates columns, <> marks text columns."""
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


def in_columns(result: Result, *names: str) -> Iterable[list[object]]:
    """Returns the rows with one column for each of these names."""
    return ([row[name] for name in names] for row in result["rows"])


def and_join(values: Iterable[object]) -> str:
    *first, last = map(str, dict.fromkeys(values))
    return f"{', '.join(first)} and {last}" if first else last


def span(numbers: Iterable[float]) -> str:
    numbers = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{x:.2f}" for x in (numbers[0], numbers[-1])))


def attention(result: Result) -> list[str]:
    rows = result["rows"]
    columns = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_place = {(row["method"], row["case"], row["dtype"]): row for row in rows}

    def cell(method: str, column: tuple[str, str]) -> str:
        row = by_place.get((method, *column))
        if row is None or "ms" not in row:
            return NONE if row is None else row["why_not"]
        text = f"{row['ms']:.0f} ({row['of_matmul']:.2f})"
        return f"**{text}**" if row["chosen"] else text

    package = result["versions"].get("ringattention")
    published = f" `ringattention` is the PyPI package {package}." if package else ""
    tokens = and_join(row["tokens"] for row in rows)
    table = section(
        f"**{result['title'].capitalize()}**, {tokens} tokens. Each cell gives the time in ms, and "
        "in parentheses the rate of FLOPs as a fraction of a matrix product's rate. FLOPs count "
        "only unmasked pairs. Times are interleaved medians. **Bold** marks the choice of "
        f"`choose_algorithm`.{published}",
        " | ".join(["<>", *(f"{case}, {dtype}" for case, dtype in columns)]),
        ([method, *(cell(method, column) for column in columns)] for method in methods),
        result,
    )
    times = []
    for other, name in (
        ("jax.nn, sharded by XLA", "sharded dense attention"),
        ("ringattention", "`ringattention`"),
    ):
        ratios = {
            dtype: by_place[other, case, dtype]["ms"] / by_place["zigzag", case, dtype]["ms"]
            for case, dtype in columns
            if case == "causal"
            and all("ms" in by_place.get((m, case, dtype), ()) for m in (other, "zigzag"))
        }
        if ratios:
            faster = and_join(f"{ratio:.1f}" for ratio in ratios.values())
            times.append(f"{faster} times as fast as {name} ({and_join(ratios)})")
    return [*table, "", f"Causal: `zigzag` is {'; '.join(times)}."] if times else table


def attention_growth(result: Result, images: str = "images") -> list[str]:
    """Returns a picture from the folder `images`, a path relative to the page."""
    peaks: dict[int, dict[str, float]] = {}
    for row in result["rows"]:
        if "peak_MB" in row:
            peaks.setdefault(row["tokens"], {})[row["method"]] = row["peak_MB"]
    both = [n for n, peak in peaks.items() if {"zigzag", "jax.nn, sharded by XLA"} <= set(peak)]
    share = ""
    if both:
        peak = peaks[max(both)]
        share = (
            f" At {max(both)} tokens `zigzag` needs "
            f"{peak['zigzag'] / peak['jax.nn, sharded by XLA']:.3f} of the memory of "
            "sharded dense attention."
        )
    title = result["title"]
    picture = f"![Time and memory of attention]({images}/attention_growth.svg)"
    return [f"**Growth of attention**: {title}.{share}", "", picture, "", f"({origin(result)})"]


def local_attention(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        what = f"{row['case']}, {row['dtype']}", row["pass"].replace("_", " and ")
        dense = f"{row['times_faster']} ×" if "times_faster" in row else NONE
        return [*what, row["seconds"], row["share_of_float32_matmul"], dense]

    title = result["title"].capitalize()
    return section(
        f'**{title}**: one causal document, packed documents, and full attention. "Of matmul" is '
        "the rate of counted FLOPs as a fraction of a float32 matrix product's rate. The last "
        "column is the speedup over `jax.nn.dot_product_attention` with a mask.",
        "<> | <> | seconds | of matmul | speedup over dense",
        map(cells_of, result["rows"]),
        result,
    )


def comm_gemm(result: Result) -> list[str]:
    products: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        layer = f"{row['layer']}, {row['M']} × {row['K']} × {row['N']}"
        products.setdefault((row["devices"], row["dtype"], layer), {})[row["what"]] = row

    def cells_of(key: tuple, rows: dict[str, dict]) -> list[object]:
        xla, auto = rows.get("xla"), rows.get("auto")
        of_xla = lambda name: f"{rows[name]['of_xla']:.2f}" if name in rows else NONE
        best = [row["of_xla"] for name, row in rows.items() if name not in ("xla", "auto")]
        chosen = f" ({auto['chosen']}; best {max(best):.2f})" if auto and best else ""
        share = f"{100 * xla['communication_share']:.0f} %" if xla else NONE
        return [
            *key,
            *((xla["ms"], xla["bound_ms"], share) if xla else [NONE] * 3),
            *map(of_xla, ("none", "ring direct", "ring", "ring pairs", "pipeline 2")),
            f"{of_xla('auto')}{chosen}",
        ]

    return section(
        f"**Overlapped GEMMs**, {result['title']} of a Llama-like layer, M × K × N. The XLA "
        "baseline is `all_gather` then a GEMM, or a GEMM then `psum_scatter`. The bound is the "
        'longer of its two parts; "communication" is the share of communication in its time. The '
        'method columns give the speedup over the baseline (more than one is faster). "auto" '
        "follows a table that `tune` measured before. On CPU, the copies and float32 partial sums "
        "of ring, pairs and pipeline take time from the cores that multiply; a direct ring has "
        "neither.",
        "devices | <dtype> | <> | XLA ms | bound | communication | none | ring direct | ring "
        "| pairs | pipeline 2 | <auto>",
        (cells_of(key, rows) for key, rows in products.items()),
        result,
    )


def comm_gemm_tokens(result: Result) -> list[str]:
    return section(
        f"**Overlapped GEMMs, {result['title']}**: on global arrays, inside `shard_map`, with "
        "tokens reshaped to [B, cp, T/cp, D], and by XLA's own partitioner. The last column counts "
        "XLA's all-gathers in the compiled program.",
        "<> | <> | ms | speedup over XLA | all-gathers",
        in_columns(result, "what", "way", "ms", "of_xla", "all_gathers"),
        result,
    )


def gemm_processes(result: Result) -> list[str]:
    return section(
        f"**Overlapped GEMMs between processes**: {result['title']}; one device per process. The "
        "baseline is XLA with gloo collectives; the last column is the speedup over it.",
        "processes | <> | <> | ms | speedup over gloo",
        in_columns(result, "processes", "op", "what", "ms", "times_gloo"),
        result,
    )


def scaling(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        share = row["of_bfloat16_bytes"]
        return [
            *(row["layer"], row["pass"], row["mode"], row["ms"], f"{row['of_bfloat16']:.2f}"),
            row["arriving_MiB"] or NONE,
            NONE if share is None else f"{share:.3f}",
            f"{row['error']:.1e}",
            f"{row['error_of_spread_tokens']:.1e}",
        ]

    devices = and_join(row["devices"] for row in result["rows"])
    return section(
        f"**{result['title'].capitalize()}** on {devices} virtual devices. The CPU widens narrow "
        "operands before it multiplies, so fewer bytes move but the product is no faster. Errors "
        "are relative to a float64 result, per token; the last column is for tokens of widely "
        "different magnitudes. A reduce-scatter sends float32 sums in every mode; its received "
        "bytes are those of the gradient.",
        "<layer> | <> | <mode> | ms | speedup over bfloat16 | MiB received | of bfloat16's bytes "
        "| error | error, spread tokens",
        map(cells_of, result["rows"]),
        result,
    )


def exchange(result: Result) -> list[str]:
    places: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        place = row["devices"], row["bytes_per_rank"] // 1024, row["what"]
        places.setdefault(place, {})[row["implementation"]] = row

    def cells_of(place: tuple, rows: dict[str, dict]) -> list[object]:
        value = lambda name, key: rows[name][key] if name in rows else NONE
        ours = (value("in_process", key) for key in ("us", "GB_per_s", "of_memcpy"))
        return [*place, *ours, *(value("xla", key) for key in ("us", "GB_per_s"))]

    return section(
        f"**Exchanges of ring and Hamilton attention**, {result['title']}: this package's "
        "transport (`in_process`) and XLA's collectives. GB/s counts all ranks together; \"of "
        "memcpy\" is that rate as a fraction of memcpy's.",
        "devices | KiB per rank | <> | in_process µs | GB/s | of memcpy | xla µs | GB/s",
        (cells_of(*item) for item in places.items()),
        result,
    )


def dispatch(result: Result) -> list[str]:
    return section(
        f"**Movement.** One {result['title']}. Times are interleaved medians.",
        "<> | ms | GB/s | of memcpy",
        in_columns(result, "what", "ms", "GB_per_s", "of_memcpy"),
        result,
    )


def processes(result: Result) -> list[str]:
    return section(
        f"**Between processes of one host**: {result['title']}; one device per process, through "
        "shared memory and with gloo collectives. The last column is the speedup over the faster "
        "of two gloo collectives.",
        "processes | MB | <> | ms | of memcpy | speedup over gloo",
        in_columns(result, "processes", "MB", "what", "ms", "of_memcpy", "times_gloo"),
        result,
    )


def latency(result: Result) -> list[str]:
    names = ("devices", "what", "loop_us", "trace_ms", "call_returns_us", "call_done_us")
    return section(
        f"**Latency.** {result['title']}, medians. The columns give the time of one operation "
        "inside `lax.scan`, of tracing a new function with one operation, and of calling a "
        "compiled program with one operation: until the call returns, and until its result is "
        "ready. The last operation adds one and moves nothing.",
        "devices | <> | in a loop µs | tracing ms | call returns µs | result ready µs",
        in_columns(result, *names),
        result,
    )


def growth(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        timed = [
            f"{row[f'{name}_{unit}']:.2f}"
            for name in ("donated", "fresh", "ppermute")
            for unit in ("ms", "GB_per_s")
        ]
        return [row["bytes_per_rank"] // 1024, row["devices"], *timed, f"{row['memcpy_ms']:.2f}"]

    return section(
        "**Growth.** Each rank sends a fixed payload, an equal part to every rank, in one program. "
        "`ppermute` sends the same amount to one neighbour. GB/s counts all ranks together; times "
        "are interleaved medians.",
        "KiB per rank | devices | donated window ms | GB/s | fresh window ms | GB/s | ppermute ms "
        "| GB/s | memcpy ms",
        map(cells_of, result["rows"]),
        result,
    )


def training(result: Result) -> list[str]:
    package = result["versions"].get("ringattention")
    return [
        *section(
            f"**{result['title'].capitalize()}**, by algorithm of attention; the rest of the model "
            "is the same. Times are interleaved medians of whole steps, with update. The speedup "
            "is over dense attention sharded by XLA. Memory is the temporary memory of the "
            "compiled step on one device, by XLA's analysis. `ringattention` is the PyPI package "
            f"{package}.",
            "<attention> | ms | tokens/s | speedup | temporary MB",
            in_columns(result, "method", "ms", "tokens_per_s", "of_dense", "temp_MB"),
            result,
        ),
        "",
        "The picture shows the time of a device in operations of each named scope, in one profiled "
        "step.",
        "",
        "![Time of a training step by scope](images/training.svg)",
    ]


ALL: tuple[Callable[[Result], list[str]], ...] = (
    *(attention, attention_growth, local_attention, comm_gemm, comm_gemm_tokens, gemm_processes),
    *(scaling, exchange, dispatch, processes, latency, growth, training),
)  # named after their result files
