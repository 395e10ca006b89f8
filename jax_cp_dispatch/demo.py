"""The demonstration: its arguments, its steps in the order of a user, and its report."""

import argparse
import pathlib
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._command import MOST_DEVICES, InputError, check_number, end_command
from jax_cp_dispatch._measuring import call_seconds
from jax_cp_dispatch._text import Progress
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.planning import Plan, plan_attention
from jax_cp_dispatch.plots import plot_plan


class Document(NamedTuple):
    """A text file; its bytes are the tokens."""

    name: str
    tokens: np.ndarray  # uint8 [length]


class PackedDocuments(NamedTuple):
    """Documents in the global sequence, and the arrays that a data pipeline would produce.

    Attributes:
      tokens, segment_ids, positions: int32 `[1, num_tokens]`; segment 0 is padding.
      spans: name, first row and end row (exclusive) of each document.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    spans: tuple[tuple[str, int, int], ...]


def read_documents(folder: pathlib.Path, *, pattern: str) -> Iterator[Document]:
    """Yields the text files below `folder` in a random order, always the same.

    Skips empty and binary files, and installed packages, which the standard library's folder may
    contain.
    """
    paths = sorted(
        path
        for path in folder.rglob(pattern)
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    )
    for index in np.random.default_rng(0).permutation(len(paths)):
        try:
            data = paths[index].read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if data and b"\0" not in data:
            name = str(paths[index].relative_to(folder))
            yield Document(name, np.frombuffer(data, np.uint8))


def pack_documents(
    documents: Iterator[Document], *, num_tokens: int, longest: int
) -> PackedDocuments:
    """Fills a sequence with documents that follow each other; the last one is cut.

    Args:
      documents: read until the sequence is full or no document is left.
      num_tokens: of the sequence.
      longest: maximum tokens of a document; longer ones are cut.
    """
    tokens, segment_ids, positions = np.zeros((3, 1, num_tokens), np.int32)
    spans, end = [], 0
    for segment, document in enumerate(documents, start=1):
        length = min(len(document.tokens), longest, num_tokens - end)
        rows = slice(end, end + length)
        tokens[0, rows] = document.tokens[:length]
        segment_ids[0, rows] = segment
        positions[0, rows] = np.arange(length)
        spans.append((document.name, end, end := end + length))
        if end == num_tokens:
            break
    return PackedDocuments(tokens, segment_ids, positions, tuple(spans))


_LEAST_ROWS = 256  # documents are padded to powers of two from here, so that few programs compile


def largest_difference(
    packed: PackedDocuments, operands: Any, results: Any, show: Callable[[float], None]
) -> dict[str, float]:
    """Returns the largest difference from dense attention, relative to the largest entry.

    Args:
      packed: the documents.
      operands: q, k, v and the cotangent `[1, T, heads, H]`, on the host.
      results: the output and the gradients of q, k and v.
      show: reports the share of the work that is done.
    """
    expected = [np.zeros(x.shape, x.dtype) for x in results]
    pairs = np.array([(stop - start) ** 2 for _, start, stop in packed.spans], float)
    for index, (_, start, stop) in enumerate(packed.spans):
        length = stop - start
        num_rows = max(_LEAST_ROWS, 1 << (length - 1).bit_length())
        padding = (0, 0), (0, num_rows - length), (0, 0), (0, 0)  # no earlier query attends it
        document = [np.pad(x[:, start:stop], padding) for x in operands]
        for whole, part in zip(expected, _output_and_gradients(*document), strict=True):
            whole[:, start:stop] = part[:, :length]
        show(pairs[: index + 1].sum() / pairs.sum())
    return {
        name: float(np.abs(got - want).max() / np.abs(want).max())
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }


@jax.jit
def _output_and_gradients(q, k, v, dout):
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(dout)


TOLERANCE = 2e-5  # of float32 results, relative to the largest entry
AXIS = "cp"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 32
_MOST_TOKENS = 2**24  # the sequence is in the memory of this machine several times
_PICTURES = (".png", ".pdf", ".svg")
_SOURCES = pathlib.Path(sysconfig.get_path("stdlib"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=pathlib.Path,
        default=_SOURCES,
        help="folder of text files (default: the sources of the Python standard library)",
    )
    parser.add_argument(
        "--pattern",
        default=None,
        help="which files (default: *.py; if a folder is given, all of its files)",
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--tokens-per-rank", type=int, default=4096, help="default 4096")
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=pathlib.Path("plan.png"),
        help="file for the picture of the plan (default plan.png)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status: 0, 1 if a result is wrong, 2 if an argument
    is not usable."""
    return end_command("demo", _run, arguments)


def _run(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    folder, num_ranks = arguments.folder, arguments.ranks
    pattern = arguments.pattern or ("*.py" if folder == _SOURCES else "*")
    _check(arguments, pattern)
    num_tokens = num_ranks * arguments.tokens_per_rank
    start_cpu_devices(num_ranks)
    progress = Progress(6)
    with progress.step(f"reading {folder}"):
        longest = max(1, num_tokens // 8)  # the reference has all logits in memory
        texts = read_documents(folder, pattern=pattern)
        packed = pack_documents(texts, num_tokens=num_tokens, longest=longest)
    if not packed.spans:
        raise InputError(f"no text file matches {pattern!r} below {folder}. Pass --pattern.")
    make_plan = partial(plan_attention, packed.segment_ids, packed.positions, world_size=num_ranks)
    seconds = {}
    with progress.step("planning"):
        plan = make_plan()
        seconds["planning"] = call_seconds(make_plan)
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), (AXIS,))
    operands = [jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in embed(packed)]
    documents = Documents(packed.segment_ids, packed.positions).with_plan(plan)
    shard = lambda spec: NamedSharding(mesh, spec)
    documents = jax.device_put(documents, jax.tree.map(shard, documents.specs(AXIS)))
    with progress.step("compiling attention, forward and backward"):
        program = attention_and_gradients(mesh).lower(*operands, documents).compile()
    with progress.step(f"running it over {num_ranks} devices"):
        results = program(*operands, documents)
        seconds["attention"] = call_seconds(lambda: program(*operands, documents))
    with progress.step("checking against dense attention, by document") as show:
        host = lambda arrays: [np.asarray(x) for x in arrays]
        differences = largest_difference(packed, host(operands), host(results), show)
    with progress.step(f"drawing {arguments.picture}"):
        try:
            plot_plan(plan, arguments.picture)
            picture = str(arguments.picture)
        except ImportError as error:
            picture = f"none: {error}"
    is_right = _report(packed, plan, seconds, differences)
    print(f"picture               {picture}")
    print(f"whole demonstration   {time.perf_counter() - begin:.1f} s")
    return 0 if is_right else 1


def _check(arguments: argparse.Namespace, pattern: str) -> None:
    """Refuses arguments before anything is computed."""
    if not arguments.folder.is_dir():
        raise InputError(f"{arguments.folder} is not a folder. Name one that holds text files.")
    check_number("--ranks", arguments.ranks, minimum=1, maximum=MOST_DEVICES)
    most = _MOST_TOKENS // arguments.ranks
    check_number("--tokens-per-rank", arguments.tokens_per_rank, minimum=1, maximum=most)
    try:
        next(arguments.folder.rglob(pattern), None)
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"--pattern is {pattern!r}: {error}. Pass one such as *.txt.") from None
    path = arguments.picture
    if path.suffix.lower() not in _PICTURES or path.is_dir() or not path.parent.is_dir():
        raise InputError(
            f"--picture is {path}; it needs to be a file in an existing folder, with a suffix of "
            f"{', '.join(_PICTURES)}."
        )


def embed(packed: PackedDocuments) -> list[np.ndarray]:
    """Returns q, k, v and a cotangent `[1, T, heads, H]`: byte embeddings rotated by position."""
    rng = np.random.default_rng(0)
    angles = packed.positions[..., None, None] / 10000 ** (np.arange(HEAD_DIM) / HEAD_DIM)
    arrays = []
    for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
        table = rng.normal(size=(256, num_heads, HEAD_DIM))
        arrays.append((table[packed.tokens] * np.cos(angles)).astype(np.float32))
    return arrays


def attention_and_gradients(mesh: Mesh) -> Any:
    """Returns one jitted program: forward and backward pass over all devices."""

    @jax.jit
    def program(q, k, v, dout, documents):
        def attend(q, k, v):
            return context_parallel_attention(
                q, k, v, mesh=mesh, axis_name=AXIS, algorithm="balanced", documents=documents
            )

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(dout)

    return program


def _report(
    packed: PackedDocuments,
    plan: Plan,
    seconds: Mapping[str, float],
    differences: Mapping[str, float],
) -> bool:
    """Prints sizes, times and differences; returns whether the results are correct."""
    lengths = [stop - start for _, start, stop in packed.spans]
    num_tokens = packed.tokens.size
    moved = {"queries": plan.num_q_tokens_moved, "keys, values": plan.num_kv_tokens_moved}
    # Forward: q there, out back, k and v there. Backward: dout there, dq back, dk and dv back.
    moved_bytes = 4 * sum(
        rows_bytes(int(rows), num_heads=heads, head_size=HEAD_DIM, itemsize=4)
        for rows, heads in zip(moved.values(), (NUM_HEADS, NUM_KV_HEADS), strict=True)
    )

    def work(pairs: Iterable[Any]) -> str:
        flops = [attention_flops(float(x), num_heads=NUM_HEADS, head_size=HEAD_DIM) for x in pairs]
        each = " ".join(f"{x / 1e9:.1f}" for x in flops)
        return f"max/mean {max(flops) / statistics.mean(flops):.3f}   [{each}] GFLOP"

    print()
    print(f"documents             {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens")
    print(
        f"tokens                {num_tokens}, of these {num_tokens - sum(lengths)} padding; "
        f"{plan.world_size} ranks"
    )
    print(f"work before planning  {work(plan.pairs_before)}")
    print(f"work after planning   {work(plan.pairs)}")
    for name, rows in moved.items():
        share = int(rows) / num_tokens
        print(f"{name + ' moved':<22}{int(rows)} ({share:.2f} of all), copies counted")
    print(f"bytes moved           {moved_bytes / 1e6:.1f} MB, forward and backward")
    print(f"time of planning      {1e3 * seconds['planning']:.1f} ms")
    print(f"time of attention     {1e3 * seconds['attention']:.1f} ms, forward and backward")
    each = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(f"largest difference    {each} (relative to dense attention)")
    is_right = all(value <= TOLERANCE for value in differences.values())  # false for NaN
    verdict = "correct" if is_right else "WRONG"
    print(f"                      {verdict}: the tolerance is {TOLERANCE:.0e}")
    return is_right
