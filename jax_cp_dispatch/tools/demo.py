"""Packs real documents, plans balanced causal attention, runs it forward and backward over virtual
CPU devices and checks everything against dense attention."""

import argparse
import pathlib
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.planning import Plan, plan_attention
from jax_cp_dispatch.plots import plot_plan
from jax_cp_dispatch.tools import MOST_DEVICES, InputError, Progress, at_most, call_seconds
from jax_cp_dispatch.tools.programs import AXIS, BY_COLUMN, Ranks, make_segment_ids

HELP = "plan attention of real documents, run it on virtual CPU devices and check it"
# Of float32 results, relative to the largest entry. In documents of 4,096 tokens, dq is up to 3e-5
# from float64, by the difference of two sums; JAX's dense attention in float32 is up to 1.2e-5.
TOLERANCE = 4e-5
HEADS: dict[str, Any] = {"num_heads": 2, "head_size": 32}
NUM_KV_HEADS = 1
_MOST_TOKENS = 2**24  # the sequence is in the memory of this machine several times
_PICTURES = (".png", ".pdf", ".svg")
_SOURCES = pathlib.Path(sysconfig.get_path("stdlib"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path = parser.add_argument, pathlib.Path
    folder = "folder of text files (default: the sources of the Python standard library)"
    add("folder", nargs="?", type=path, default=_SOURCES, help=folder)
    devices = "virtual CPU devices (default 8)"
    add("--ranks", type=at_most(MOST_DEVICES), default=8, help=devices)
    add("--tokens-per-rank", type=at_most(_MOST_TOKENS), default=4096, help="default 4096")
    picture = "file for the picture of the plan (default plan.png)"
    add("--picture", type=path, default=path("plan.png"), help=picture)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status: 0, or 1 if a result is wrong."""
    begin = time.perf_counter()
    folder, num_ranks = arguments.folder, arguments.ranks
    num_tokens = num_ranks * arguments.tokens_per_rank
    _check(arguments)
    start_cpu_devices(num_ranks)
    progress, seconds = Progress(6), {}
    with progress.step(f"reading {folder}"):
        longest = max(1, num_tokens // 8)  # the reference has all logits in memory
        tokens, lengths = pack(read_texts(folder), num_tokens=num_tokens, longest=longest)
    if not lengths:
        raise InputError(f"{folder} has no text file. Name a folder that holds some.")
    padding = num_tokens - sum(lengths)
    ids = np.pad(make_segment_ids(lengths), ((0, 0), (0, padding)))
    make_plan = partial(plan_attention, ids, world_size=num_ranks)
    with progress.step("planning"):
        plan = make_plan()
        seconds["planning"] = call_seconds(make_plan)
    ranks = Ranks.of_devices(num_ranks, repeats=1)
    rng, (N, H) = np.random.default_rng(0), HEADS.values()
    # q, k, v and a cotangent [1, T, heads, H]: random embeddings of the tokens.
    table = [
        rng.standard_normal((256, n, H), np.float32) for n in (N, NUM_KV_HEADS, NUM_KV_HEADS, N)
    ]
    operands = [ranks.put(x[tokens], BY_COLUMN) for x in table]
    documents = ranks.put_documents(Documents(ids).with_plan(plan))
    over: Any = {"mesh": ranks.mesh, "axis_name": AXIS, "algorithm": "balanced"}
    attend = partial(context_parallel_attention, **over)
    with progress.step("compiling attention, forward and backward"):
        program = _with_gradients.lower(attend, *operands, documents=documents).compile()
    with progress.step(f"running it over {num_ranks} devices"):
        results = program(*operands, documents=documents)
        seconds["attention"] = call_seconds(lambda: program(*operands, documents=documents))
    with progress.step("checking against dense attention, by document"):
        host = lambda arrays: [np.asarray(x) for x in arrays]
        differences = largest_difference(lengths, host(operands), host(results))
    with progress.step(f"drawing {arguments.picture}"):
        try:
            plot_plan(plan, arguments.picture)
            picture = str(arguments.picture)
        except ImportError as error:
            picture = f"none: {error}"
    is_right = all(value <= TOLERANCE for value in differences.values())  # false for NaN
    each = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    lines = {
        "documents": f"{len(lengths)}, of {min(lengths)} to {max(lengths)} tokens",
        "tokens": f"{num_tokens}, of these {padding} padding; {num_ranks} ranks",
        **_about(plan),
        "time of planning": f"{1e3 * seconds['planning']:.1f} ms",
        "time of attention": f"{1e3 * seconds['attention']:.1f} ms, forward and backward",
        "largest difference": f"{each} (relative to dense attention)",
        "": f"{'correct' if is_right else 'WRONG'}: the tolerance is {TOLERANCE:.0e}",
        "picture": picture,
        "whole demonstration": f"{time.perf_counter() - begin:.1f} s",
    }
    print("", *(f"{name:<22}{text}" for name, text in lines.items()), sep="\n")
    return 0 if is_right else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuses arguments before anything is computed."""
    most, path = _MOST_TOKENS // arguments.ranks, arguments.picture
    if not arguments.folder.is_dir():
        raise InputError(f"{arguments.folder} is not a folder. Name one that holds text files.")
    if arguments.tokens_per_rank > most:
        raise InputError(f"--tokens-per-rank is {arguments.tokens_per_rank}; pass 1 to {most}.")
    if path.suffix.lower() not in _PICTURES or path.is_dir() or not path.parent.is_dir():
        raise InputError(
            f"--picture is {path}; it needs to be a file in an existing folder, with a suffix of "
            f"{', '.join(_PICTURES)}."
        )


def read_texts(folder: pathlib.Path) -> Iterator[bytes]:
    """Yields the text files below `folder` in a random order, always the same.

    Skips empty and binary files. Of the standard library, yields its sources, without the installed
    packages that its folder may contain.
    """
    paths = sorted(
        path
        for path in folder.rglob("*.py" if folder == _SOURCES else "*")
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    )
    for index in np.random.default_rng(0).permutation(len(paths)):
        try:
            data = paths[index].read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if data and b"\0" not in data:
            yield data


def pack(texts: Iterable[bytes], *, num_tokens: int, longest: int) -> tuple[np.ndarray, list[int]]:
    """Fills a sequence with texts, whose bytes are the tokens; returns it, and their lengths.

    A text has at most `longest` tokens. The last one is cut; without more texts, zeros follow.
    """
    tokens, lengths = bytearray(), []
    for text in texts:
        lengths.append(min(len(text), longest, num_tokens - len(tokens)))
        tokens += text[: lengths[-1]]
        if len(tokens) == num_tokens:
            break
    return np.frombuffer(tokens.ljust(num_tokens, b"\0"), np.uint8)[None], lengths


@partial(jax.jit, static_argnums=0)
def _with_gradients(attend: Callable[..., Any], q, k, v, dout, **options):
    out, pull_back = jax.vjp(partial(attend, **options), q, k, v)
    return out, *pull_back(dout)


_dense = partial(jax.nn.dot_product_attention, is_causal=True)
_LEAST_ROWS = 256  # documents are padded to powers of two from here, so that few programs compile


def largest_difference(lengths: list[int], operands: Any, results: Any) -> dict[str, float]:
    """Returns the largest difference, relative to the largest entry, from attention in float64.

    It compares the output and the gradients of q, k and v. `operands` are these three and the
    cotangent, `[1, T, heads, H]`, on the host.
    """
    expected = [np.zeros(x.shape) for x in results]
    for stop, length in zip(np.cumsum(lengths), lengths, strict=True):
        rows = slice(stop - length, stop)
        num_rows = max(_LEAST_ROWS, 1 << (length - 1).bit_length())
        padding = (0, 0), (0, num_rows - length), (0, 0), (0, 0)  # no earlier query attends it
        document = [np.pad(np.asarray(x[:, rows], float), padding) for x in operands]
        with jax.enable_x64(True):
            parts = _with_gradients(_dense, *document)
        for whole, part in zip(expected, parts, strict=True):
            whole[:, rows] = part[:, :length]
    return {
        name: float(np.abs(got - want).max() / np.abs(want).max())
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }


def _about(plan: Plan) -> dict[str, str]:
    """Returns lines of the report: work, and what moves."""

    def work(pairs: Iterable[Any]) -> str:
        flops = [attention_flops(float(x), **HEADS) for x in pairs]
        each = " ".join(f"{x / 1e9:.1f}" for x in flops)
        return f"max/mean {max(flops) / statistics.mean(flops):.3f}   [{each}] GFLOP"

    q_rows, kv_rows = int(plan.num_q_tokens_moved), int(plan.num_kv_tokens_moved)
    moved = lambda rows: f"{rows} ({rows / plan.world_size / plan.num_tokens:.2f} of all)"
    # Forward: q there, out back, k and v there. Backward: dout there, dq back, dk and dv back.
    num_bytes = 4 * rows_bytes(q_rows, **HEADS, itemsize=4)
    num_bytes += 4 * rows_bytes(kv_rows, **HEADS | {"num_heads": NUM_KV_HEADS}, itemsize=4)
    return {
        "work before planning": work(plan.pairs_before),
        "work after planning": work(plan.pairs),
        "queries moved": f"{moved(q_rows)}, copies counted",
        "keys, values moved": f"{moved(kv_rows)}, copies counted",
        "bytes moved": f"{num_bytes / 1e6:.1f} MB, forward and backward",
    }
