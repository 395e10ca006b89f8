"""Predicted and measured times of attention and overlapped GEMMs, and choices based on them.

From below: spans of computation and communication, with their trace file; what a program of this
process has overlapped; Hamilton attention step by step; the part of each rank alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, DTypeLike, Float

from jax_cp_dispatch._arguments import HostOrDevice, check_positive, check_type
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch._text import table
from jax_cp_dispatch.attention import Choice
from jax_cp_dispatch.attention.algorithms import (
    ALGORITHMS,
    Algorithm,
    Balanced,
    Hamilton,
    Placed,
    refuse,
)
from jax_cp_dispatch.attention.algorithms.algorithm import RankProgram, Shape
from jax_cp_dispatch.attention.choose import Auto, read_algorithm
from jax_cp_dispatch.attention.local.passes import attend_blocks
from jax_cp_dispatch.attention.local.ranges import OnlineSoftmax, check_softmax
from jax_cp_dispatch.attention.operands import Call, Operands, check_operand_rows
from jax_cp_dispatch.attention.rotating import Rotation, attend_sequence, rearranged, token_ranges
from jax_cp_dispatch.comm_gemm import CommGemmChoice
from jax_cp_dispatch.cycles import CycleRows
from jax_cp_dispatch.documents.documents import (
    Documents,
    check_call_ranks,
    read_given,
    read_whole,
    replaced,
    trusted,
)
from jax_cp_dispatch.documents.table import Row, document_table
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.masks.selected import refuse_picks
from jax_cp_dispatch.planning import Plan

__all__ = [
    "AttentionProfile",
    "BalanceProfile",
    "Choice",
    "CommGemmChoice",
    "OverlapProfile",
    "RankProfile",
    "Span",
    "StepProfile",
    "balance_profile",
    "hamilton_attention_profile",
    "overlap_profile",
]

# ---- Spans.

COMPUTATION, COMMUNICATION = "computation", "communication"
_KINDS = (COMPUTATION, COMMUNICATION)


class Span(NamedTuple):
    """An activity of a rank.

    Attributes:
      rank: its rank.
      kind: "computation" or "communication".
      name: for example "step 3".
      start: seconds from the beginning of the timeline.
      duration: seconds.
    """

    rank: int
    kind: str
    name: str
    start: float
    duration: float


def write_chrome_trace(spans: Iterable[Span], path: str | os.PathLike) -> pathlib.Path:
    """Writes spans as a JSON trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Each rank is shown as a process with two threads: computation and communication. Returns the
    path. Source: Trace Event Format (Google), "complete" and "metadata" events; times in
    microseconds.
    """
    spans = sorted(spans)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        names = [("process_name", 0, f"rank {rank}")]
        names += [("thread_name", thread, kind) for thread, kind in enumerate(_KINDS)]
        for what, thread, text in names:
            label = {"ph": "M", "name": what, "args": {"name": text}}
            events.append(label | {"pid": rank, "tid": thread})
    for rank, kind, name, start, duration in spans:
        event = {"ph": "X", "name": name, "cat": kind, "ts": 1e6 * start, "dur": 1e6 * duration}
        events.append(event | {"pid": rank, "tid": _KINDS.index(kind)})
    path = pathlib.Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    return path


def busy_seconds(spans: Iterable[Span], *kinds: str) -> dict[int, float]:
    """Returns, for each rank, the seconds covered by at least one span of these kinds."""
    busy, ends = {}, {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind in kinds:
            stop = span.start + span.duration
            begin = max(span.start, ends.get(span.rank, span.start))
            busy[span.rank] = busy.get(span.rank, 0.0) + max(0.0, stop - begin)
            ends[span.rank] = max(stop, begin)
    return busy


def exposed_seconds(spans: Sequence[Span]) -> dict[int, float]:
    """Returns, for each rank, the seconds in which it communicates without computing."""
    busy, computing = busy_seconds(spans, *_KINDS), busy_seconds(spans, COMPUTATION)
    return {x: busy[x] - computing.get(x, 0.0) for x in busy_seconds(spans, COMMUNICATION)}


# ---- What a program overlaps.


@dataclasses.dataclass(frozen=True)
class OverlapProfile:
    """The profile of one run; times are those of the slowest rank, in seconds.

    Attributes:
      result: result of the program.
      spans: GEMMs and communication of each rank, in order of time; ranks of other groups are
        numbered after those of the first.
    """

    result: Any
    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """Time from the start of the first span to the end of the last one."""
        return max((x.start + x.duration for x in self.spans), default=0.0)

    @property
    def computation(self) -> float:
        """Time in which a rank multiplies or sums."""
        return max(busy_seconds(self.spans, COMPUTATION).values(), default=0.0)

    @property
    def communication(self) -> float:
        """Time in which a rank sends or reads."""
        return max(busy_seconds(self.spans, COMMUNICATION).values(), default=0.0)

    @property
    def exposed_communication(self) -> float:
        """Time in which a rank sends or reads, and does not multiply."""
        return max(exposed_seconds(self.spans).values(), default=0.0)

    @property
    def bound(self) -> float:
        """max(computation, communication), a lower bound for any overlap of the two."""
        return max(self.computation, self.communication)

    def write_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """See `write_chrome_trace`."""
        return write_chrome_trace(self.spans, path)


def overlap_profile(fn: Callable[..., Any], *operands: Any) -> OverlapProfile:
    """Runs a compiled program twice and profiles its overlapped GEMMs in the second run.

    Call on the host. Records all calls of `all_gather_matmul`, `matmul_reduce_scatter`, and `gemm`
    with a buffer that this process runs on the package's transports in that run. With several
    processes, all must call it, and each records its own ranks, including the data they fetch from
    others.

    Args:
      fn: a function under `jax.jit`.
      operands: its arguments.
    Returns:
      The result of the second run, and the spans of every rank.
    Raises:
      TypeError: `fn` cannot be called.
      ValueError: nothing was recorded, because the program has no such call or uses XLA's
        collectives; or its calls use several axes.
    """
    if not callable(fn):
        raise TypeError(
            f"overlap_profile: fn is of type {type(fn).__name__}; it needs to be a function. Pass "
            "one under jax.jit, then its operands."
        )
    jax.block_until_ready(fn(*operands))
    recorders = [x for x in (runtime.native, runtime.cuda) if x is not None]
    for recorder in recorders:
        recorder.start_spans()
    try:
        result = jax.block_until_ready(fn(*operands))
    finally:
        recorded = [span for recorder in recorders for span in recorder.stop_spans()]
    if not recorded:
        raise ValueError(
            "overlap_profile: the program ran no GEMM with communication on a transport of this "
            "package. See available_implementations()."
        )
    axes = {op.split(" over ")[-1] for op, *_ in recorded}
    if len(axes) > 1:
        raise ValueError(
            f"overlap_profile: the program's GEMMs communicate over {' and '.join(sorted(axes))}, "
            "whose ranks differ. Profile them in separate programs."
        )
    begin = min(start for *_, start, _ in recorded)
    group_size = 1 + max(rank for _, _, rank, *_ in recorded)
    spans = [
        Span(
            rank=group * group_size + rank,
            kind=COMMUNICATION if is_communication else COMPUTATION,
            name=f"{name} ({op})",
            start=1e-9 * (start - begin),
            duration=1e-9 * duration,
        )
        for op, group, rank, is_communication, name, start, duration in recorded
    ]
    return OverlapProfile(result, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


# ---- Hamilton attention, step by step.


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One step; median seconds until the slowest rank was ready.

    Attributes:
      name: "to zigzag", "step t" and "from zigzag".
      communication: time of the exchange of this step; 0 if there is none.
      computation: time of attention over the held keys.
    """

    name: str
    communication: float
    computation: float


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """One rank; seconds of all steps, each from the start of the step until the rank was ready.

    Attributes:
      rank: its number.
      communication: time of its exchanges; it includes waiting for slower ranks.
      computation: time of its attention. Virtual devices share cores, so it includes waiting for a
        core.
    """

    rank: int
    communication: float
    computation: float


@dataclasses.dataclass(frozen=True)
class AttentionProfile:
    """Times of a forward pass: as a whole, and by step.

    Attributes:
      total: seconds of the whole program, compiled as one, where an exchange and the computation
        of its step overlap; median.
      spans: of each rank. The exchange and the computation of a step start together; the next step
        starts when the slowest rank has finished both.
      out: the output, from the steps.
    """

    total: float
    spans: tuple[Span, ...]
    out: Array

    @property
    def steps(self) -> tuple[StepProfile, ...]:
        """The same exchanges and attention, run step by step.

        The work before and after them (ranges, cutting into blocks, division by the sums) is only
        included in `total`.
        """
        longest: dict[str, dict[str, float]] = {}
        for span in self.spans:
            times = longest.setdefault(span.name, dict.fromkeys(_KINDS, 0.0))
            times[span.kind] = max(times[span.kind], span.duration)
        return tuple(StepProfile(name, **times) for name, times in longest.items())

    @property
    def communication(self) -> float:
        """Seconds of all exchanges."""
        return sum(step.communication for step in self.steps)

    @property
    def computation(self) -> float:
        """Seconds of all computation."""
        return sum(step.computation for step in self.steps)

    @property
    def ranks(self) -> tuple[RankProfile, ...]:
        """The times of each rank, from the spans."""
        sent, computed = (busy_seconds(self.spans, kind) for kind in (COMMUNICATION, COMPUTATION))
        return tuple(RankProfile(x, sent.get(x, 0.0), computed[x]) for x in sorted(computed))

    def write_chrome_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the spans as a JSON trace for Perfetto, with two rows per rank."""
        return write_chrome_trace(self.spans, path)

    def __str__(self) -> str:
        steps = [(step.name, step) for step in self.steps]
        ranks = [(f"rank {rank.rank}", rank) for rank in self.ranks]

        def times(rows: Sequence[tuple[str, Any]]) -> str:
            ms = lambda seconds: f"{1e3 * seconds:.2f}"
            texts = [(name, ms(x.communication), ms(x.computation)) for name, x in rows]
            return table(("", COMMUNICATION, COMPUTATION), texts, indent=0)

        return (
            f"hamilton: {1e3 * self.total:.2f} ms as one program; step by step, until the slowest "
            f"rank is ready, ms:\n{times([*steps, ('all', self)])}\n"
            f"All steps, by rank, ms:\n{times(ranks)}"
        )


@door("hamilton_attention_profile")
def hamilton_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    mesh: Mesh,
    axis_name: str,
    nodes: int | None = None,
    cycles: CycleRows | str | None = None,
    maps: tuple[CycleRows, CycleRows] | None = None,
    repeats: int = 3,
    mask: Mask | str | None = None,
    documents: Documents | None = None,
    segment_ids: Any = None,
    positions: Any = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> AttentionProfile:
    """Times Hamilton attention, forward, as one program and step by step.

    Call outside `jit` and `jax.shard_map`, in a process that owns all devices of the mesh. Each
    step runs separately, with synchronisation before and after it. For other algorithms, use
    `jax.profiler`: their operations have the scopes `cpd.attention` and `cpd.exchange`.

    Args:
      q, k, v: global arrays; `axis_name` has n devices, and n divides T.
      mesh: the mesh with `axis_name`; the arrays are replicated over its other axes.
      axis_name: the mesh axis of the ranks.
      nodes, cycles, maps: see `Hamilton`.
      repeats: runs of every program; medians are returned.
      mask, documents, segment_ids, positions, scale, logit_soft_cap: as in
        `context_parallel_attention`, on global arrays.
      implementation, deadline, num_comm_sm: of the exchanges, as there.
    Returns:
      The times, and the output in the layout of q.
    Raises:
      TypeError, ValueError: as `context_parallel_attention`.
    """
    op = "hamilton_attention_profile"
    check_type(op, "mesh", mesh, Mesh, "Pass the mesh of the ranks.")
    check_positive(op, repeats=repeats)
    options = read_options(op, axis_name, None, implementation, deadline, num_comm_sm)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r} but the mesh has axes {tuple(mesh.axis_names)}. "
            "Name one of these."
        )
    num_ranks, algorithm = mesh.shape[axis_name], Hamilton(nodes, cycles, maps)
    algorithm.schedule(op, num_ranks)  # raises before the arrays are read
    refuse_picks(op, mask)
    given = read_given(op, documents, segment_ids, positions, mask, follows_plan=False)
    check_softmax(op, scale, logit_soft_cap)
    call = Call(options, (num_ranks,), q.shape[2], given.order, scale, logit_soft_cap)
    refuse(algorithm, call, given.mask)
    check_operand_rows(op, Operands(q, k, v), given.segment_ids, given.positions)
    B, T = q.shape[:2]
    if T % num_ranks:
        raise ValueError(
            f"{op}: T is {T} but {axis_name!r} has {num_ranks} devices, which need to divide it. "
            "Pad the arrays; segment 0 is padding."
        )
    check_call_ranks(op, given, T, num_ranks, f"{axis_name!r} has {num_ranks} devices")
    given = replaced(given, mask=read_mask_on_host(op, given.mask, (B, T)))
    of_rank = [jax.ShapeDtypeStruct((B, T // num_ranks, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    rotation = algorithm.rotation(call, given.mask, *of_rank)
    given = read_whole(op, given, num_ranks)
    steps = _Steps(mesh, axis_name, repeats)
    by_rank = lambda x: np.moveaxis(np.asarray(x).reshape(B, num_ranks, -1, *x.shape[2:]), 1, 0)
    arrays = jax.tree.map(by_rank, (q, k, v, given))
    arrays = jax.device_put(arrays, NamedSharding(mesh, P(axis_name)))
    whole = lambda q, k, v, packed: attend_sequence(rotation, Operands(q, k, v), packed).out
    seconds, _ = steps.run(whole, *arrays)
    out = jnp.moveaxis(_run_steps(rotation, steps, *arrays), 0, 1).reshape(*q.shape[:3], -1)
    out = jax.device_put(out, NamedSharding(mesh, P(None, axis_name)))
    return AttentionProfile(max(seconds), tuple(steps.spans), out)


def _run_steps(rotation: Rotation, steps: _Steps, q, k, v, packed: Documents):
    """Runs the steps of `attend_sequence`, each kind as one program."""
    (B, T), dtype = q.shape[1:3], q.dtype
    num_ranks, fetch_keys = rotation.call.num_ranks, rotation.schedule.fetch_keys

    def move(name, fn, *operands):
        if not rotation.rearranges:
            return steps.run(fn, *operands)[1]
        return steps.step(name, communication=(fn, *operands))[0]

    def begin(q, k, v, packed):
        ranges = token_ranges(rotation, packed, (B, T))._replace(fault=None)
        queries, own, _ = rotation.tile(q, (k, v), ranges)
        return ranges, queries, own, OnlineSoftmax.of_nothing(queries, rotation.value_size)

    def attend(queries, ranges, held, seen, step):
        _, rows, key_ranges = rotation.held_keys(held, ranges, step)
        return attend_blocks(rotation.passes, queries, key_ranges, rotation.key_blocks(rows), seen)

    q, k, v = move("to zigzag", lambda *x: rearranged(rotation, x), q, k, v)
    _, (ranges, queries, own, seen) = steps.run(begin, q, k, v, packed)
    held = own
    for step in range(num_ranks):
        number = np.full(num_ranks, step, np.int32)
        parts = {COMPUTATION: (attend, queries, ranges, held, seen, number)}
        if step < num_ranks - 1:
            fetch = partial(fetch_keys, rotation.call.exchange)
            parts = {COMMUNICATION: (fetch, own, held, number), **parts}
        *fetched, seen = steps.step(f"step {step}", **parts)
        held = fetched[0] if fetched else held
    out = lambda seen: seen.result(rotation.q_shape, rotation.num_groups)[0].astype(dtype)
    _, out = steps.run(out, seen)
    return move("from zigzag", lambda out: rearranged(rotation, (out,), back=True)[0], out)


_POLL = 20e-6  # seconds


class _Steps:
    """Runs functions of one rank on a whole mesh, and times when each rank is ready.

    Arrays have the parts of all ranks as their first axis. All devices belong to this process.
    `spans` are those of the steps so far.
    """

    def __init__(self, mesh: Mesh, axis_name: str, repeats: int):
        self.spans: list[Span] = []
        self._over, self._repeats, self._now = (mesh, axis_name), repeats, 0.0
        axis = mesh.axis_names.index(axis_name)
        self._rank = {device: place[axis] for place, device in np.ndenumerate(mesh.devices)}

    def step(self, name: str, **parts: Any) -> list[Any]:
        """Runs the parts, kind=(function, *operands), of one step; returns their results."""
        results, longest = [], 0.0
        for kind, (fn, *operands) in parts.items():
            seconds, result = self.run(fn, *operands)
            results.append(result)
            longest = max(longest, *seconds)
            self.spans += [Span(r, kind, name, self._now, s) for r, s in enumerate(seconds)]
        self._now += longest
        return results

    def run(self, fn: Callable[..., Any], *operands: Any) -> tuple[list[float], Any]:
        """Returns median seconds until each rank was ready, and the result; warms up first."""
        result = jax.block_until_ready(_on_ranks(fn, *self._over, *operands))
        times: list[list[float]] = [[] for _ in set(self._rank.values())]
        for _ in range(self._repeats):
            begin = time.perf_counter()
            pending = [
                (self._rank[shard.device], shard.data)
                for leaf in jax.tree.leaves(_on_ranks(fn, *self._over, *operands))
                for shard in leaf.addressable_shards
            ]
            seconds = [0.0] * len(times)
            while pending:
                now = time.perf_counter() - begin
                for rank, _ in pending:
                    seconds[rank] = now
                pending = [entry for entry in pending if not entry[1].is_ready()]
                time.sleep(_POLL)
            for of_rank, value in zip(times, seconds, strict=True):
                of_rank.append(value)
        return list(map(statistics.median, times)), result


@partial(jax.jit, static_argnums=(0, 1, 2))
def _on_ranks(fn: Callable[..., Any], mesh: Mesh, axis_name: str, *arrays):
    def of_rank(*arrays):
        return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], arrays)))

    specs: Any = {"in_specs": P(axis_name), "out_specs": P(axis_name)}
    return jax.shard_map(of_rank, mesh=mesh, check_vma=False, **specs)(*arrays)


# ---- The part of each rank alone.


@dataclasses.dataclass(frozen=True)
class BalanceProfile:
    """What every rank computes, each alone on the same device.

    Attributes:
      name: of the algorithm, or of the function.
      seconds: of each rank; median over the rounds.
      work: of each rank, a count.
      unit: what `work` counts: "pairs" of a query and a key, "rows" of experts.
    """

    name: str
    seconds: tuple[float, ...]
    work: tuple[int, ...]
    unit: str

    @property
    def busiest(self) -> float:
        """Seconds of the slowest rank: a lower bound for a step of all ranks."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """Longest time of a rank divided by the mean; 1 is perfect."""
        return self.busiest / statistics.mean(self.seconds)

    @property
    def work_imbalance(self) -> float:
        """Largest work of a rank divided by the mean; 1 is perfect, and the value without work."""
        mean = statistics.mean(self.work)
        return max(self.work) / mean if mean else 1.0

    def __str__(self) -> str:
        ranks = zip(self.seconds, self.work, strict=True)
        rows = [(str(r), f"{1e3 * s:.2f}", str(n)) for r, (s, n) in enumerate(ranks)]
        return (
            f"{self.name}: busiest rank {1e3 * self.busiest:.2f} ms, {self.imbalance:.3f} of "
            f"the mean; in {self.unit} {self.work_imbalance:.3f}\n"
            f"{table(('rank', 'ms', self.unit), rows)}"
        )


_OP = "balance_profile"
_MEASURED = tuple(x.name for x in ALGORITHMS if x.rank_program is not Algorithm.rank_program)


def balance_profile(
    lengths: Iterable[Row] | Row,
    *,
    world_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: DTypeLike = "bfloat16",
    columns: int | None = None,
    mask: Mask | str | None = None,
    algorithms: Sequence[Algorithm | Plan | str] = _MEASURED,
    backward: bool = True,
    repeats: int = 3,
) -> tuple[BalanceProfile, ...]:
    """Times attention of each rank of a batch, one rank after the other, on one device.

    A step over many devices takes as long as its busiest rank. This measures the busiest rank, and
    the balance in seconds, of any number of ranks on one device, without a mesh: each rank's
    queries, with the number of keys that it would receive. Exchanges are not run. Ranks and
    algorithms are interleaved over the rounds. The values of q, k and v are random.

    Call outside `jit`. The device needs memory for one rank. On CPU, seconds are processor time,
    so other processes do not count.

    Args:
      lengths, columns, mask: the documents of one batch; see `plan_attention`.
      world_size: number of ranks W.
      num_heads, num_kv_heads, head_size: of the model, on one rank.
      dtype: of q, k and v.
      algorithms: names or objects, as for `context_parallel_attention`, or plans of these
        documents, of all ranks. "zigzag" and "hamilton" compute in zigzag layout, "placed" with the
        placement of `place_tokens`.
      backward: the gradients of q, k and v as well.
      repeats: rounds.
    Returns:
      One profile per algorithm.
    Raises:
      TypeError, ValueError: as `plan_attention`; or the heads do not match, an algorithm is "auto",
        or a plan is for other sizes.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    check_positive(_OP, repeats=repeats, **sizes)
    table = document_table(_OP, world_size=world_size, lengths=lengths, columns=columns)
    refuse_picks(_OP, mask)
    mask = read_mask_on_host(_OP, mask, (table.batch, table.columns))
    rows = table.batch, table.columns // world_size
    heads = num_heads, num_kv_heads, num_kv_heads
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    qkv = [Shape((*rows, n, head_size), dtype) for n in heads]
    call = Call(read_options(_OP, "ranks"), (world_size,), num_heads)
    programs = []
    for given in algorithms:
        documents = trusted(table.numbers(), mask=mask)
        if isinstance(given, Plan):
            algorithm = _algorithm_of(given, world_size, rows)
            documents = replaced(documents, plans=(given,))
        else:
            algorithm = read_algorithm(_OP, given)
        program = None
        if not isinstance(algorithm, Auto):
            program = algorithm.rank_program(call, documents, qkv, backward=backward)
        if program is None:
            raise ValueError(
                f"{_OP}: got algorithm {algorithm.name!r}. Name algorithms that can be measured: "
                f"{', '.join(map(repr, _MEASURED))}."
            )
        programs.append((algorithm.name, _run_ranks(program), program.num_pairs))
    return time_ranks(programs, "pairs", repeats)


def _algorithm_of(plan: Plan, world_size: int, rows: tuple[int, int]) -> Algorithm:
    """Returns the algorithm that follows a plan of these ranks, each with these rows `[B, T]`."""
    held = plan.batch, plan.num_tokens // plan.batch
    if plan.fingerprint.shape[:-1] != (world_size,) or held != rows:
        ranks = list(plan.fingerprint.shape[:-1])
        raise ValueError(
            f"{_OP}: got a plan of {ranks} ranks with {held[0]} x {held[1]} rows, but the "
            f"documents need one of [{world_size}] with {rows[0]} x {rows[1]}. Pass the "
            "plan of all ranks for these documents."
        )
    return Placed() if plan.is_placed else Balanced()


def _run_ranks(program: RankProgram) -> Callable[[int], Any]:
    rng = np.random.default_rng(0)
    random = lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype)
    arrays = jax.device_put([random(x) for x in program.shapes])
    ranges = jax.device_put(program.ranges)
    compiled = jax.jit(program.run)
    return lambda rank: compiled(np.int32(rank), *arrays, ranges[rank])


def time_ranks(
    programs: Sequence[tuple[str, Callable[[int], Any], np.ndarray]], unit: str, repeats: int
) -> tuple[BalanceProfile, ...]:
    """Times each rank of each program: a name, what runs one rank, and the work [W] in `unit`.

    Ranks and programs take turns in each round. On CPU, seconds are processor time, so other
    processes do not count.
    """
    now = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for _, run, _ in programs:  # compile, and touch memory
        jax.block_until_ready(run(0))
    times = [[[0.0] * repeats for _ in work] for *_, work in programs]
    for number in range(repeats):
        for of_program, (_, run, _) in zip(times, programs, strict=True):
            for rank, of_rank in enumerate(of_program):
                start = now()
                jax.block_until_ready(run(rank))
                of_rank[number] = now() - start
    return tuple(
        BalanceProfile(name, tuple(map(statistics.median, seconds)), tuple(work.tolist()), unit)
        for (name, _, work), seconds in zip(programs, times, strict=True)
    )
