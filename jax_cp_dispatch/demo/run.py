"""The demonstration's steps, in the order in which a user would take them."""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch.attention import (
    context_parallel_attention,
    local_attention,
    local_attention_backward,
)
from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.demo.dense import dense_attention
from jax_cp_dispatch.demo.documents import PackedDocuments, pack_documents, read_documents
from jax_cp_dispatch.dispatch import combine, dispatch
from jax_cp_dispatch.planner import AttentionPlan, plan_attention
from jax_cp_dispatch.plots import plot_plan

AXIS = "cp"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
TOLERANCE = 2e-5  # of float32 results, relative to the largest entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=pathlib.Path,
        default=pathlib.Path(sysconfig.get_path("stdlib")),
        help="folder of text files (default: the sources of the Python standard library)",
    )
    parser.add_argument(
        "--pattern",
        default=None,
        help="which files (default: *.py, or all files of a folder that is named)",
    )
    parser.add_argument(
        "--long-documents",
        choices=("span", "cut"),
        default="span",
        help="documents longer than a rank span ranks (default), or are cut",
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--tokens-per-rank", type=int, default=4096, help="default 4096")
    parser.add_argument("--seed", type=int, default=0, help="which documents come first")
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=pathlib.Path("plan.png"),
        help="file for the picture of the plan (default plan.png)",
    )


def start_devices(num_devices: int) -> None:
    """Brings up virtual CPU devices. To be called before JAX is used."""
    # jax 0.10 deadlocks with many programs in flight unless its thread pool exceeds the devices.
    os.environ.setdefault("PJRT_NPROC", str(2 * num_devices))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


class Progress:
    """Numbered steps with their time, on standard error, so that a long one shows that it runs."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._step = 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[float], None]]:
        self._step += 1
        label = f"[{self._step}/{self._num_steps}] {what} "
        start = time.perf_counter()

        def show(fraction: float) -> None:
            if sys.stderr.isatty():
                bar = "#" * round(20 * fraction)
                print(f"\r{label:<60}|{bar:<20}|", end="", file=sys.stderr, flush=True)

        show(0)
        yield show
        again = "\r" if sys.stderr.isatty() else ""
        seconds = time.perf_counter() - start
        print(f"{again}{label:<60}{seconds:6.1f} s{'':<14}", file=sys.stderr, flush=True)


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of `run`, which has been compiled, and its seconds."""
    start = time.perf_counter()
    result = jax.block_until_ready(run(*arguments))
    return result, time.perf_counter() - start


def median_seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Median of five runs after a first one that does not count."""
    run(*arguments)
    return statistics.median(timed(run, *arguments)[1] for _ in range(5))


def embed(packed: PackedDocuments, seed: int) -> tuple[np.ndarray, ...]:
    """q, k, v and a cotangent `[1, T, heads, H]`: byte embeddings turned by the position."""
    rng = np.random.default_rng(seed)
    angles = packed.positions[..., None, None] / 10000 ** (np.arange(HEAD_DIM) / HEAD_DIM)
    arrays = []
    for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
        table = rng.normal(size=(256, num_heads, HEAD_DIM))
        arrays.append((table[packed.tokens] * np.cos(angles)).astype(np.float32))
    return tuple(arrays)


def attention_and_gradients(mesh: Mesh) -> Any:
    """One jitted program: forward and backward over all devices."""

    @jax.jit
    def program(q, k, v, dout, plan):
        def attend(q, k, v):
            return context_parallel_attention(
                q, k, v, mesh=mesh, axis_name=AXIS, algorithm="balanced", plan=plan
            )

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(dout)

    return program


def movement_alone(mesh: Mesh) -> Any:
    """All exchanges of a forward and a backward pass, and nothing else."""

    def local(q, k, v, plan):
        q, k, v = (x[0] for x in (q, k, v))
        send = partial(dispatch, axis_name=AXIS)
        bring = partial(combine, axis_name=AXIS, num_tokens=len(q))
        received_q = send(q, plan.q_metadata, capacity=plan.q_capacity)
        received_kv = send((k, v), plan.kv_metadata, capacity=plan.kv_capacity)
        out = bring(received_q, plan.q_metadata)
        dout = send(out, plan.q_metadata, capacity=plan.q_capacity)
        dq, (dk, dv) = bring(dout, plan.q_metadata), bring(received_kv, plan.kv_metadata)
        return dq[None], dk[None], dv[None]

    rows = P(None, AXIS)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, P(AXIS)), out_specs=rows)
    )


def attention_alone(mesh: Mesh) -> Any:
    """The local attention of every rank, forward and backward, on rows already received."""

    def local(plan, key):
        def rows(key, capacity, num_heads):
            return jax.random.normal(key, (1, capacity, num_heads, HEAD_DIM))

        keys = jax.random.split(key, 4)
        q, dout = (rows(key, plan.q_capacity, NUM_HEADS) for key in keys[:2])
        k, v = (rows(key, plan.kv_capacity, NUM_KV_HEADS) for key in keys[2:])
        ranges = plan.kv_start, plan.kv_end
        out, lse = local_attention(q, k, v, *ranges)
        return local_attention_backward(q, k, v, *ranges, out, lse, dout)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False)
    )


def largest_difference(
    packed: PackedDocuments, operands: Any, results: Any, show: Callable[[float], None]
) -> dict[str, float]:
    """The largest difference to dense attention of each document, over the largest entry."""
    q, k, v, dout = (x[0] for x in operands)
    expected = [np.zeros(x.shape[1:]) for x in results]
    pairs = np.array([(stop - start) ** 2 for _, start, stop in packed.spans], float)
    for index, (_, start, stop) in enumerate(packed.spans):
        rows = slice(start, stop)
        for whole, part in zip(
            expected, dense_attention(q[rows], k[rows], v[rows], dout[rows]), strict=True
        ):
            whole[rows] = part
        show(pairs[: index + 1].sum() / pairs.sum())
    return {
        name: float(np.abs(got[0] - want).max() / np.abs(want).max())
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
    }


def moved_bytes(plan: AttentionPlan) -> int:
    """Bytes that cross between ranks, forward and backward, in float32."""
    row = partial(rows_bytes, head_size=HEAD_DIM, itemsize=4)
    # Forward: q there, out back, k and v there. Backward: dout there, dq back, dk and dv back.
    q_like = 4 * row(int(plan.num_q_tokens_moved), num_heads=NUM_HEADS)
    kv_like = 4 * row(int(plan.num_kv_tokens_moved), num_heads=NUM_KV_HEADS)
    return q_like + kv_like


def main(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status: 0, or 1 if a result is wrong."""
    begin = time.perf_counter()
    start_devices(arguments.ranks)
    progress = Progress(7)
    folder = arguments.folder
    is_default = folder == pathlib.Path(sysconfig.get_path("stdlib"))
    pattern = arguments.pattern or ("*.py" if is_default else "*")

    with progress.step(f"reading {folder}"):
        if not folder.is_dir():
            print(
                f"\ndemo: {folder} is not a folder. Name one that holds text files.",
                file=sys.stderr,
            )
            return 2
        packed = pack_documents(
            read_documents(folder, pattern=pattern, seed=arguments.seed),
            num_ranks=arguments.ranks,
            tokens_per_rank=arguments.tokens_per_rank,
            long_documents=arguments.long_documents,
        )
        if not packed.spans:
            print(
                f"\ndemo: no text file matches {pattern!r} below {folder}. Pass --pattern.",
                file=sys.stderr,
            )
            return 2

    def make_plan() -> AttentionPlan:
        return plan_attention(packed.segment_ids, packed.positions, world_size=arguments.ranks)

    with progress.step("planning"):
        plan = make_plan()
        planning = median_seconds(make_plan)
    mesh = Mesh(np.array(jax.devices()[: arguments.ranks]), (AXIS,))
    operands = [
        jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in embed(packed, arguments.seed)
    ]
    plan = jax.device_put(plan, NamedSharding(mesh, P(AXIS)))

    program = attention_and_gradients(mesh)
    with progress.step("compiling attention, forward and backward"):
        compiled = program.lower(*operands, plan).compile()
    with progress.step(f"running it over {arguments.ranks} devices"):
        results, together = timed(compiled, *operands, plan)
    with progress.step("checking against dense attention, by document") as show:
        differences = largest_difference(
            packed, [np.asarray(x) for x in operands], [np.asarray(x) for x in results], show
        )
    with progress.step("timing movement and attention apart"):
        movement = median_seconds(movement_alone(mesh), *operands[:3], plan)
        random = jax.random.key(0)
        attend = attention_alone(mesh).lower(plan, random).compile()
        _, attention = timed(attend, plan, random)
    with progress.step(f"drawing {arguments.picture}"):
        try:
            plot_plan(plan, arguments.picture)
            picture = f"{arguments.picture}"
        except ImportError as error:
            picture = f"none: {error}"

    is_right = max(differences.values()) <= TOLERANCE
    report(
        packed,
        plan,
        differences,
        is_right,
        {
            "planning": planning,
            "movement": movement,
            "attention": attention,
            "together": together,
        },
        picture,
    )
    print(f"whole demonstration   {time.perf_counter() - begin:.1f} s")
    return 0 if is_right else 1


def report(packed, plan, differences, is_right, seconds, picture) -> None:
    """Prints what was done, how well, and how fast."""
    lengths = [stop - start for _, start, stop in packed.spans]
    num_tokens = packed.tokens.size

    def work(pairs) -> str:
        flops = [attention_flops(float(x), num_heads=NUM_HEADS, head_size=HEAD_DIM) for x in pairs]
        each = " ".join(f"{x / 1e9:.1f}" for x in flops)
        return f"max/mean {max(flops) / statistics.mean(flops):.3f}   [{each}] GFLOP"

    def moved(tokens) -> str:
        return f"{int(tokens)} ({int(tokens) / num_tokens:.2f} of all)"

    print()
    print(f"documents             {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens")
    print(
        f"tokens                {num_tokens}, of these {num_tokens - sum(lengths)} padding; "
        f"{plan.world_size} ranks"
    )
    print(f"forward work at home  {work(plan.pairs_before)}")
    print(f"forward work planned  {work(plan.pairs_after)}")
    print(f"queries moved         {moved(plan.num_q_tokens_moved)}")
    print(f"keys, values moved    {moved(plan.num_kv_tokens_moved)}, copies counted")
    print(f"bytes moved           {moved_bytes(plan) / 1e6:.1f} MB, forward and backward")
    for name, value in seconds.items():
        suffix = "" if name == "planning" else ", forward and backward"
        print(f"time of {name:<14}{1e3 * value:.1f} ms{suffix}")
    each = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(f"largest difference    {each} (relative to dense attention)")
    print(
        f"                      {'right' if is_right else 'WRONG'}: "
        f"the tolerance is {TOLERANCE:.0e}"
    )
    print(f"picture               {picture}")
