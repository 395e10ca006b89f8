"""`python -m jax_cp_dispatch bench`: its arguments, sizes, sections in turn, and output."""

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence

import jax

from jax_cp_dispatch._command import MOST_DEVICES, InputError, check_number, end_command
from jax_cp_dispatch._measuring import machine, versions
from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch._text import Progress, byte_count, duration, paragraph, short_count, table
from jax_cp_dispatch.bench_command import attention, gemm, movement
from jax_cp_dispatch.bench_command.gemm import GATHER, SCATTER
from jax_cp_dispatch.bench_command.ranks import Ranks, Row
from jax_cp_dispatch.cpu_devices import start_cpu_devices

SECTIONS = ("movement", "attention", "gemm")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all sections.

    Attributes:
      repeats: rounds of interleaved runs.
      moved_tokens, feature: rows per rank of an exchange in bfloat16, and their shape.
      tokens, heads, head_size: of one attention layer over all ranks, in `dtype`.
      gemms: (op, M, K, N) of global size, in `dtype`.
    """

    repeats: int
    moved_tokens: int
    tokens: int
    heads: int
    head_size: int
    dtype: str
    gemms: tuple[gemm.Shape, ...]
    feature: tuple[int, ...] = (16, 128)

    def shared(self, num_ranks: int) -> "Sizes":
        """Rounds sizes that ranks share up to two equal parts per rank."""
        up = lambda size: math.ceil(size / (2 * num_ranks)) * 2 * num_ranks
        gemms = tuple((op, up(m), up(k), up(n)) for op, m, k, n in self.gemms)
        return dataclasses.replace(self, tokens=up(self.tokens), gemms=gemms)


CPU = Sizes(
    *(3, 4096, 4096, 8, 64, "float32"),
    ((GATHER, 4096, 1024, 5632), (SCATTER, 4096, 2816, 1024)),
)
QUICK = Sizes(
    *(1, 256, 1024, 4, 64, "float32"),
    ((GATHER, 1024, 256, 1408), (SCATTER, 1024, 704, 256)),
)
GPU = Sizes(
    *(5, 32768, 16384, 8, 128, "bfloat16"),
    ((GATHER, 8192, 4096, 28672), (SCATTER, 8192, 14336, 4096)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; all if none"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round; on CPU devices, small sizes"
    )
    parser.add_argument(
        "--devices", type=int, help="virtual CPU devices (default 8), or GPUs (default all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if a section failed, 2 if an argument is not usable."""
    return end_command("bench", _run, options)


def _run(options: argparse.Namespace) -> int:
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        raise InputError(f"no section is called {unknown[0]}. Pass some of {', '.join(SECTIONS)}.")
    check_number("--devices", options.devices, minimum=1, maximum=MOST_DEVICES)
    _start_devices(options.devices)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise InputError(f"--devices is {count} but JAX has {jax.device_count()} devices.")
    sizes = sizes_for(jax.default_backend(), quick=options.quick).shared(count)
    ranks = Ranks.of_devices(count, sizes.repeats)
    names = options.sections or SECTIONS
    progress, is_first = Progress(len(names)), jax.process_index() == 0
    measured: dict[str, list[Row]] = {}
    errors: dict[str, str] = {}
    for name in names:
        rows = measured[name] = []
        with progress.step(f"measuring {name}"):
            try:
                for row in _section(name, ranks, sizes):
                    rows.append(row)
            except Exception as error:  # the other sections still run
                errors[name] = f"{type(error).__name__}: {error}"
        if is_first and not options.json:
            print(*filter(None, [_tables(name, rows), errors.get(name)]), "", sep="\n", flush=True)
    if is_first and options.json:
        report = {
            "devices": f"{ranks.name} ({jax.devices()[0].device_kind})",
            "machine": machine(),
            "versions": versions(),
            "errors": errors,
            "rows": [
                {"section": name} | dataclasses.asdict(row)
                for name, rows in measured.items()
                for row in rows
            ],
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return 1 if errors else 0


def sizes_for(platform: str, *, quick: bool) -> Sizes:
    if platform == "gpu":
        return dataclasses.replace(GPU, repeats=1) if quick else GPU
    return QUICK if quick else CPU


def _start_devices(num_devices: int | None) -> None:
    """Uses GPUs, or starts virtual CPU devices. Joins the job if this process belongs to one."""
    has_gpu = pathlib.Path("/dev/nvidiactl").exists()
    on_cpu = os.environ.get("JAX_PLATFORMS", "" if has_gpu else "cpu") == "cpu"
    if "JAX_NUM_PROCESSES" in os.environ:
        initialize()
    elif on_cpu:
        start_cpu_devices(num_devices or 8)


def _section(name: str, ranks: Ranks, sizes: Sizes) -> Iterator[Row]:
    if name == "movement":
        dtype = jax.numpy.dtype("bfloat16")
        yield from movement.large(ranks, sizes.moved_tokens, sizes.feature, dtype)
        yield from movement.small(ranks)
    elif name == "attention":
        yield from attention.measure(ranks, sizes.tokens, sizes.heads, sizes.head_size, sizes.dtype)
    else:
        yield from gemm.measure(ranks, sizes.gemms, sizes.dtype)


def _tables(section: str, rows: Sequence[Row]) -> str:
    """Returns a table for each size."""
    parts = []
    for size, group in itertools.groupby(rows, key=lambda row: row.size):
        rows = list(group)
        first = rows[0]
        details = [f"limit: {first.limit}"] * bool(first.limit)
        details += [f"speedup over {first.alternative}"] * bool(first.alternative)
        lines = [
            [f"  {row.what}", duration(row.seconds), _rate(row)]
            + ["–" if x is None else f"{x:.2f}" for x in (row.of_limit, row.speedup)]
            for row in rows
        ]
        title = paragraph(f"{section}: {size} ({'; '.join(details)})", indent=0)
        parts.append(f"{title}\n{table(('', 'time', 'rate', 'of limit', 'speedup'), lines)}")
    return "\n".join(parts)


def _rate(row: Row) -> str:
    if row.rate is None:
        return "–"
    is_bytes = row.unit == "B/s"
    return f"{byte_count(row.rate)}/s" if is_bytes else f"{short_count(row.rate)} {row.unit}"
