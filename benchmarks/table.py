"""Writes the README's benchmark table from the result files.

python benchmarks/table.py          after `./run bench`
"""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"


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


def movement() -> list[str]:
    result = load("dispatch")
    lines = [
        f"**Movement.** One {result['title']} (4096 tokens per rank, 16 heads × 128, bfloat16, "
        "random segments), interleaved medians. The process keeps freed "
        "memory (`start_cpu_devices`); if that is forbidden, a fresh window pays for its pages: "
        "0.2 to 0.44 of memcpy, and less than 0.1 between the collectives.",
        "",
        cells("", "ms", "GB/s", "of memcpy"),
        "|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(cells(row["what"], row["ms"], row["GB_per_s"], row["of_memcpy"]))
    return [*lines, "", f"({origin(result)})"]


def latency() -> list[str]:
    result = load("latency")
    lines = [
        f"**Latency.** {result['title']}, medians: one operation inside `lax.scan`; tracing a new "
        "function that holds one; and one call of a compiled program that holds one, until it "
        "returns and until its result is there. The last operation adds 1 and moves nothing.",
        "",
        cells("devices", "", "in a loop µs", "tracing ms", "call returns µs", "result µs"),
        "|---:|---|---:|---:|---:|---:|",
    ]
    names = ("devices", "what", "loop_us", "trace_ms", "call_returns_us", "call_done_us")
    lines += [cells(*(row[name] for name in names)) for row in result["rows"]]
    return [*lines, "", f"({origin(result)})"]


def growth() -> list[str]:
    result = load("growth")
    lines = [
        "**Growth.** A fixed payload per rank, an equal part of it to every rank, in one program; "
        "`ppermute` moves as much to one neighbour. GB/s of all ranks together, interleaved "
        "medians.",
        "",
        cells(
            *("KiB per rank", "devices", "donated window ms", "GB/s", "fresh window ms", "GB/s"),
            *("ppermute ms", "GB/s", "memcpy ms"),
        ),
        "|" + "---:|" * 9,
    ]
    for row in result["rows"]:
        timed = [
            f"{row[f'{name}_{unit}']:.2f}"
            for name in ("donated", "fresh", "ppermute")
            for unit in ("ms", "GB_per_s")
        ]
        memcpy = f"{row['memcpy_ms']:.2f}"
        lines.append(cells(row["bytes_per_rank"] // 1024, row["devices"], *timed, memcpy))
    return [*lines, "", f"({origin(result)})"]


def metadata() -> list[str]:
    result = load("metadata")
    lines = [
        "**Planning metadata.** `compute_metadata`, `compute_metadata_kv` and "
        "`compute_attn_layout_seqlens` in one program, 8 replicas, against the same in vectorised "
        "NumPy int64, interleaved medians.",
        "",
        cells("ranks × slots", "ms", "NumPy ms", "compile s", "extra memory MB"),
        "|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            cells(
                f"{row['world_size']} × {row['num_shards']}",
                f"{row['ms']:.2f}",
                f"{row['numpy_ms']:.2f}",
                f"{row['compile_s']:.1f}",
                f"{row['temp_bytes'] / 1e6:.1f}",
            )
        )
    return [*lines, "", f"({origin(result)})"]


def balance() -> list[str]:
    result = load("planner")
    published = load("planner_published_lengths")
    lines = [
        "**Balanced attention plans.** 64K tokens per rank, blocks of 128; work is query-key pairs "
        "per rank, max/mean; moved tokens as a share of all tokens (an all-gather of keys moves "
        "ranks - 1). "
        "Lengths drawn from a log-normal distribution, and from two published ones "
        "(`hao-ai-lab/distca`, `distca/simulator/data`; `bench_planner.py --lengths FILE...`).",
        "",
        cells("lengths", "ranks", "work before", "after", "q moved", "kv moved", "planning ms"),
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (*result["rows"], *published["rows"]):
        lines.append(
            cells(
                row["lengths"],
                row["world_size"],
                f"{row['imbalance_before']:.2f}",
                f"{row['imbalance']:.3f}",
                f"{row['q_moved_share']:.2f}",
                f"{row['kv_moved_share']:.2f}",
                row["plan_ms"],
            )
        )
    return [*lines, "", f"({origin(result)})"]


def attention() -> list[str]:
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

    lines = [
        f"**Attention.** {rows[0]['tokens']} tokens over 8 virtual devices, 8 heads of 64, forward "
        "and backward: ms, and the rate, counted on the pairs that the mask lets through, as a "
        "share of a matrix product's. Interleaved medians; **bold**: what `choose_algorithm` says. "
        "`ringattention` is the PyPI package 0.1.2, its `jax.lib.xla_bridge` repaired.",
        "",
        cells("", *(f"{case}, {dtype}" for case, dtype in columns)),
        "|---|" + "---:|" * len(columns),
    ]
    lines += [cells(method, *(cell(method, column) for column in columns)) for method in methods]
    grown = load("attention_growth")
    at_8k = {row["method"]: row for row in grown["rows"] if row["tokens"] == 8192}
    ours, dense = (at_8k[name]["peak_MB"] for name in ("zigzag", "jax.nn sharded"))
    ratios = [
        f"{by_place[other, *column]['ms'] / by_place['zigzag', *column]['ms']:.1f}"
        for other in ("jax.nn sharded", "ringattention")
        for column in columns
        if column[0] == "causal"
    ]
    summary = (
        "Causal, in float32 and bfloat16: `zigzag` is {} and {} times as fast as the sharded dense "
        "way, {} and {} times as fast as `ringattention`; in float32 it needs {:.3f} of the dense "
        "way's memory."
    ).format(*ratios, ours / dense)
    picture = "![Time and memory of attention](docs/images/attention_growth.svg)"
    lines += ["", summary, "", f"({origin(result)})", "", picture, "", f"({origin(grown)})"]
    return lines


def local_attention() -> list[str]:
    result = load("local_attention")
    lines = [
        "**Local attention**, one device, 8192 tokens, 8 heads of 64: one causal document, and "
        "documents of 1024 tokens. Counted FLOPs as a share of the rate of a float32 matrix "
        "product; and how many times faster than `jax.nn.dot_product_attention` with a mask.",
        "",
        cells("", "", "seconds", "of matmul", "of the dense way"),
        "|---|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        what = f"{row['case']}, {row['dtype']}", row["pass"].replace("_", " and ")
        dense = f"{row['times_faster']} ×" if "times_faster" in row else "–"
        lines.append(cells(*what, row["seconds"], row["share_of_float32_matmul"], dense))
    return [*lines, "", f"({origin(result)})"]


def exchange() -> list[str]:
    result = load("exchange")
    lines = [
        "**Exchanges of ring and Hamilton attention**, inside `lax.scan`: this package's transport "
        "(`in_process`) and XLA's collectives, GB/s of all ranks together and share of memcpy.",
        "",
        cells(
            "devices", "KiB per rank", "", "in_process µs", "GB/s", "of memcpy", "xla µs", "GB/s"
        ),
        "|---:|---:|---|" + "---:|" * 5,
    ]
    ours, xla = (
        [row for row in result["rows"] if row["implementation"] == name]
        for name in ("in_process", "xla")
    )
    for a, b in zip(ours, xla, strict=True):
        what = (a["devices"], a["bytes_per_rank"] // 1024, a["what"])
        lines.append(cells(*what, a["us"], a["GB_per_s"], a["of_memcpy"], b["us"], b["GB_per_s"]))
    return [*lines, "", f"({origin(result)})"]


def main() -> None:
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    sections = (attention, local_attention, exchange, movement, latency, growth, metadata, balance)
    table = "\n".join(line for section in sections for line in (*section(), ""))
    readme.write_text(f"{before}{BEGIN}{table}{END}{after}")


if __name__ == "__main__":
    main()
