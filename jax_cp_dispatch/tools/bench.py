"""Measures movement, attention and GEMMs. Compares each with the limit measured in the same run
(memcpy, a matrix product), and with what XLA offers."""

import argparse
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch._text import byte_count, duration, paragraph, short_count, table
from jax_cp_dispatch.cost import attention_flops, count_pairs
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools import (
    MOST_DEVICES,
    InputError,
    Progress,
    at_most,
    machine,
    programs,
    start_on_cpu,
    versions,
)
from jax_cp_dispatch.tools.programs import Ranks, Shape

HELP = "measure this machine against its limits and the alternatives"
SECTIONS = ("movement", "attention", "gemm")
Row: TypeAlias = dict[str, Any]  # one measured operation, as JSON says it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, some = parser.add_argument, f"some of {', '.join(SECTIONS)}; all if none"
    add("sections", nargs="*", metavar="SECTION", help=some)
    add("--quick", action="store_true", help="one round; on CPU devices, small sizes")
    devices = "virtual CPU devices (default 8), or GPUs (default all)"
    add("--devices", type=at_most(MOST_DEVICES), help=devices)
    add("--json", action="store_true", help="print JSON on standard output")


@dataclasses.dataclass(frozen=True)
class Sizes:
    repeats: int  # rounds of interleaved runs
    moved_tokens: int  # rows per rank of an exchange in bfloat16, of the shape `feature`
    # Of one attention layer over all ranks, in `dtype`
    tokens: int
    heads: int
    head_size: int
    product: int  # M = K = N of the matrix product that is the limit of attention
    dtype: str
    gemms: tuple[Shape, ...]  # (op, M, K, N) of global size, in `dtype`
    feature: tuple[int, ...] = (16, 128)

    def shared(self, num_ranks: int) -> "Sizes":
        """Rounds sizes that ranks share up to two equal parts per rank."""
        up = lambda size: math.ceil(size / (2 * num_ranks)) * 2 * num_ranks
        gemms = tuple((op, up(m), up(k), up(n)) for op, m, k, n in self.gemms)
        return dataclasses.replace(self, tokens=up(self.tokens), gemms=gemms)


CPU = Sizes(
    *(3, 4096, 4096, 8, 64, 2048, "float32"),
    ((programs.GATHER, 4096, 1024, 5632), (programs.SCATTER, 4096, 2816, 1024)),
)
QUICK = Sizes(
    *(1, 256, 1024, 4, 64, 2048, "float32"),
    ((programs.GATHER, 1024, 256, 1408), (programs.SCATTER, 1024, 704, 256)),
)
GPU = Sizes(
    *(5, 32768, 16384, 8, 128, 8192, "bfloat16"),
    ((programs.GATHER, 8192, 4096, 28672), (programs.SCATTER, 8192, 14336, 4096)),
)


def sizes_for(platform: str, *, quick: bool) -> Sizes:
    if platform == "gpu":
        return dataclasses.replace(GPU, repeats=1) if quick else GPU
    return QUICK if quick else CPU


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if a section failed."""
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        raise InputError(f"no section is called {unknown[0]}. Pass some of {', '.join(SECTIONS)}.")
    if "JAX_NUM_PROCESSES" in os.environ:
        initialize()  # this process belongs to a job
    elif start_on_cpu():
        start_cpu_devices(options.devices or 8)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise InputError(f"--devices is {count} but JAX has {jax.device_count()} devices.")
    sizes = sizes_for(jax.default_backend(), quick=options.quick).shared(count)
    ranks = Ranks.of_devices(count, sizes.repeats)
    measured = {
        "movement": lambda: itertools.chain(
            movement(ranks, sizes.moved_tokens, sizes.feature, jnp.bfloat16), small_messages(ranks)
        ),
        "attention": lambda: attention(ranks, sizes),
        "gemm": lambda: gemms(ranks, sizes.gemms, sizes.dtype),
    }
    names = options.sections or SECTIONS
    progress, is_first = Progress(len(names)), jax.process_index() == 0
    all_rows, errors = [], {}
    for name in names:
        rows: list[Row] = []
        with progress.step(f"measuring {name}"):
            try:
                for row in measured[name]():
                    rows.append(row)
            except Exception as error:  # the other sections still run
                errors[name] = f"{type(error).__name__}: {error}"
        if is_first and not options.json:
            print(*filter(None, [_tables(name, rows), errors.get(name)]), "", sep="\n", flush=True)
        all_rows += [{"section": name} | row for row in rows]
    if is_first and options.json:
        report = {
            "devices": f"{ranks.name} ({jax.devices()[0].device_kind})",
            "machine": machine(),
            "versions": versions(),
            "errors": errors,
            "rows": all_rows,
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return 1 if errors else 0


# ---- What is measured.


def _rows(
    seconds: Mapping[str, float],
    size: str,
    amount: tuple[int | float, str],
    limit: tuple[str, float],
    alternative: tuple[str, float],
) -> Iterator[Row]:
    """Yields a row for each operation, with its rate over all ranks, from its median seconds.

    `amount` is what each moves or computes, with the unit of the rate. `of_limit` is the speed as a
    fraction of the limit, `speedup` as a multiple of the alternative: both have a name, and the
    seconds that they took for the same amount in the same run.
    """
    names = {"unit": amount[1], "limit": limit[0], "alternative": alternative[0]}
    for what, value in seconds.items():
        speeds = {"of_limit": limit[1] / value, "speedup": alternative[1] / value}
        row = {"what": what, "size": size, "seconds": value, "rate": amount[0] / value}
        yield row | speeds | names


def movement(ranks: Ranks, tokens: int, feature: tuple[int, ...], dtype: Any) -> Iterator[Row]:
    exchange = programs.ExchangeProgram(ranks, tokens, feature, dtype)
    exchange.check()
    ours = {programs.MEMCPY: exchange.limit()} | exchange.runs
    # In one process, apart from the collectives: they use so much memory that the next run finds
    # none cached.
    is_apart = jax.process_count() == 1
    together = [ours, exchange.collectives] if is_apart else [ours | exchange.collectives]
    seconds = {name: x for runs in together for name, x in ranks.measure(runs).items()}
    limit = "a copy on each GPU" if ranks.is_gpu else "memcpy", seconds.pop(programs.MEMCPY)
    fastest = min(seconds[name] for name in exchange.collectives)
    num_bytes = exchange.x.nbytes
    yield from _rows(
        seconds,
        f"{num_bytes / 1e6:.0f} MB, {ranks.name}",
        (num_bytes, "B/s"),
        limit,
        ("the faster XLA collective", fastest),
    )


SMALL_DISPATCH, _STEPS = "small dispatch in a loop", 20


def small_messages(ranks: Ranks) -> Iterator[Row]:
    """Measures the time of one small exchange inside `lax.scan`."""
    x, plan, operations = programs.small_exchange(ranks)
    loop = lambda name: ranks.program(programs.scanned(operations[name], _STEPS))
    seconds = ranks.measure(
        {name: partial(loop(name), x, plan) for name in ("dispatch", "ppermute")}
    )
    yield dict.fromkeys(("rate", "unit", "of_limit", "limit")) | {
        "what": SMALL_DISPATCH,
        "size": f"{programs.SMALL[0]} × {programs.SMALL[1]} float32, {ranks.name}",
        "seconds": seconds["dispatch"] / _STEPS,
        "speedup": seconds["ppermute"] / seconds["dispatch"],
        "alternative": "ppermute",
    }


CAUSAL = ("ring", "zigzag", "balanced")
PACKED = ("zigzag", "balanced", "placed")


def attention(ranks: Ranks, sizes: Sizes) -> Iterator[Row]:
    """Measures one causal document, and packed documents."""
    tokens, dtype, n = sizes.tokens, sizes.dtype, sizes.product
    # Virtual devices share the cores, and one product uses them all; each GPU computes its own.
    seconds = ranks.measure({"product": programs.square_product(n, dtype)})["product"]
    flops_per_second = 2 * n**3 / seconds * (ranks.count if ranks.is_gpu else 1)
    operands = programs.random_operands(tokens, sizes.heads, sizes.head_size, dtype)
    packed = programs.drawn_lengths(tokens, seed=0, median=tokens / 16)
    for case, lengths, algorithms in (("causal", [tokens], CAUSAL), ("packed", packed, PACKED)):
        methods = *algorithms, programs.DENSE
        runs = {x: programs.attention_run(ranks, x, lengths, operands) for x in methods}
        want = runs[programs.DENSE]()
        for name in algorithms:
            if name != "placed":  # its tokens are in another order
                for a, b in zip(runs[name](), want, strict=True):
                    ranks.check_equal(f"{name}, {case}", a, b, programs.TOLERANCE[dtype])
        seconds = ranks.measure(runs)
        pairs = float(sum(count_pairs(0, length) for length in lengths))
        layer = {"num_heads": sizes.heads, "head_size": sizes.head_size}
        flops = sum(attention_flops(pairs, **layer, backward=x) for x in (False, True))
        yield from _rows(
            {f"{name}, {case}": value for name, value in seconds.items()},
            f"{tokens} tokens, {dtype}, {ranks.name}",
            (flops, "FLOP/s"),
            ("a matrix product", flops / flops_per_second),
            ("dense attention sharded by XLA", seconds[programs.DENSE]),
        )


MEASURED = {
    programs.GATHER: ("none", "ring", "ring direct"),
    programs.SCATTER: ("none", "ring direct", "pipeline 2"),
}


def gemms(
    ranks: Ranks,
    shapes: Sequence[Shape],
    dtype: str,
    methods: Mapping[str, Sequence[str]] = MEASURED,
) -> Iterator[Row]:
    """Measures GEMMs; the limit is the GEMM without communication."""
    for op, m, k, n in shapes:
        product = programs.Product(ranks, (op, m, k, n), dtype, methods[op])
        product.check()
        seconds = ranks.measure(product.runs | {programs.GEMM: product.alone})
        alone = seconds.pop(programs.GEMM)
        yield from _rows(
            {f"{op}, {name}": value for name, value in seconds.items()},
            f"{m} × {k} × {n} {dtype}, {ranks.name}",
            (2 * m * k * n, "FLOP/s"),
            ("the GEMM without communication", alone),
            (programs.XLA, seconds[programs.XLA]),
        )


# ---- What is printed.


def _tables(section: str, rows: Sequence[Row]) -> str:
    """Returns a table for each size."""
    parts = []
    for size, group in itertools.groupby(rows, key=lambda row: row["size"]):
        first, *others = group
        details = [f"limit: {first['limit']}"] if first["limit"] else []
        details.append(f"speedup over {first['alternative']}")
        lines = []
        for row in (first, *others):
            ratios = ("–" if row[x] is None else f"{row[x]:.2f}" for x in ("of_limit", "speedup"))
            rate = "–"
            if row["rate"] is not None:
                is_bytes = row["unit"] == "B/s"
                count = byte_count if is_bytes else short_count
                rate = f"{count(row['rate'])}{'/s' if is_bytes else ' FLOP/s'}"
            lines.append([f"  {row['what']}", duration(row["seconds"]), rate, *ratios])
        title = paragraph(f"{section}: {size} ({'; '.join(details)})", indent=0)
        parts.append(f"{title}\n{table(('', 'time', 'rate', 'of limit', 'speedup'), lines)}")
    return "\n".join(parts)
