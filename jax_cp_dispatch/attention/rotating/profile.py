"""Profiles ring, zigzag and Hamilton attention: runs and times each step on every rank."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._ranks.axis import check_axis_name, check_mesh
from jax_cp_dispatch.attention.algorithms import Hamilton, Ring, Rotating, Zigzag
from jax_cp_dispatch.attention.checks import HostOrDevice, check_rows
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.options import AttentionOptions, ExchangeOptions
from jax_cp_dispatch.attention.rotating.call import sharded_sequence
from jax_cp_dispatch.attention.rotating.hamilton import hamilton_attention
from jax_cp_dispatch.attention.rotating.ring import ring_attention, zigzag_ring_attention
from jax_cp_dispatch.attention.rotating.schedule_of import schedule_of
from jax_cp_dispatch.attention.rotating.sequence import (
    ShardedSequence,
    attend_sequence,
    from_layout,
    read_sequences,
    to_layout,
    token_ranges,
)
from jax_cp_dispatch.attention.rotating.stopwatch import Stopwatch
from jax_cp_dispatch.cycles.checks import CycleRows
from jax_cp_dispatch.timeline import COMMUNICATION, COMPUTATION, Span, write_chrome_trace


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One step; median seconds until the slowest rank was ready.

    Attributes:
      name: "to zigzag", "step t", or "from zigzag".
      communication: time of the exchange of this step; 0 if there is none.
      computation: time of attention over the held keys.
    """

    name: str
    communication: float
    computation: float


@dataclasses.dataclass(frozen=True)
class AttentionProfile:
    """Times of a forward pass: as a whole, and by step.

    Attributes:
      algorithm: name of the function.
      total: seconds of the whole program, compiled as one, where an exchange and the computation
        of its step overlap; median.
      steps: the same exchanges and attention, run step by step. The work before and after them
        (ranges, cutting into blocks, division by the sums) is only included in `total`.
      spans: of each rank. The exchange and the computation of a step start together; the next step
        starts when the slowest rank has finished both.
      out: the output, from the steps.
    """

    algorithm: str
    total: float
    steps: tuple[StepProfile, ...]
    spans: tuple[Span, ...]
    out: Array

    @property
    def communication(self) -> float:
        """Seconds of all exchanges."""
        return sum(step.communication for step in self.steps)

    @property
    def computation(self) -> float:
        """Seconds of all computation."""
        return sum(step.computation for step in self.steps)

    def write_chrome_trace(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the spans as a JSON trace for Perfetto, with two rows per rank."""
        return write_chrome_trace(self.spans, path)

    def __str__(self) -> str:
        lines = [f"{self.algorithm}: {1e3 * self.total:.2f} ms as one program; step by step, ms:"]
        lines.append(f"{'':<12}{'communication':>14}{'computation':>14}")
        all_steps = StepProfile("all", self.communication, self.computation)
        for step in (*self.steps, all_steps):
            times = f"{1e3 * step.communication:14.2f}{1e3 * step.computation:14.2f}"
            lines.append(f"{step.name:<12}{times}")
        return "\n".join(lines)


def ring_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    mesh: Mesh,
    axis_name: str,
    repeats: int = 3,
    **options: Any,
) -> AttentionProfile:
    """Times `ring_attention`, forward, as one program and step by step.

    Call outside `jit` and `jax.shard_map`, in a process that owns all devices of the mesh. Each
    step runs separately, with synchronisation before and after it.

    Args:
      q, k, v: global arrays; `axis_name` has n devices, and n divides T.
      mesh: the mesh with `axis_name`; the arrays are replicated over its other axes.
      axis_name: the mesh axis of the ranks.
      repeats: runs of every program; medians are returned.
      options: the other keywords of `ring_attention`; segment_ids and positions are global.
    Returns:
      The times, and the output in the layout of q.
    Raises:
      TypeError, ValueError: as `ring_attention`.
    """
    stopwatch = _stopwatch("ring_attention_profile", mesh, axis_name, repeats)
    return _profile(ring_attention, Ring(), stopwatch, (q, k, v), **options)


def zigzag_ring_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    mesh: Mesh,
    axis_name: str,
    repeats: int = 3,
    **options: Any,
) -> AttentionProfile:
    """Times `zigzag_ring_attention`, forward; otherwise as `ring_attention_profile`."""
    stopwatch = _stopwatch("zigzag_ring_attention_profile", mesh, axis_name, repeats)
    return _profile(zigzag_ring_attention, Zigzag(), stopwatch, (q, k, v), **options)


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
    **options: Any,
) -> AttentionProfile:
    """Times `hamilton_attention`, forward, with its `nodes`, `cycles` and `maps`.

    Otherwise as `ring_attention_profile`.
    """
    stopwatch = _stopwatch("hamilton_attention_profile", mesh, axis_name, repeats)
    algorithm = Hamilton(nodes, cycles, maps)
    return _profile(hamilton_attention, algorithm, stopwatch, (q, k, v), **options)


def _stopwatch(op: str, mesh: Mesh, axis_name: str, repeats: int) -> Stopwatch:
    if mesh is None:
        raise TypeError(f"{op}: mesh is None; it needs to be a jax.sharding.Mesh.")
    check_mesh(op, mesh)
    check_axis_name(op, axis_name)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r} but the mesh has axes {tuple(mesh.axis_names)}. "
            "Name one of these."
        )
    check_positive(op, repeats=repeats)
    return Stopwatch(mesh, axis_name, repeats)


def _profile(
    function: Callable[..., Any],
    algorithm: Rotating,
    stopwatch: Stopwatch,
    qkv: tuple[HostOrDevice, HostOrDevice, HostOrDevice],
    *,
    segment_ids=None,
    positions=None,
    implementation=None,
    deadline=None,
    **given,
) -> AttentionProfile:
    name, num_ranks, axis_name = function.__name__, stopwatch.num_ranks, stopwatch.axis_name
    op = f"{name}_profile"
    schedule = schedule_of(op, algorithm, num_ranks)
    unknown = given.keys() - {"causal", "layout", "window", "scale", "logit_soft_cap"}
    if unknown:
        raise TypeError(f"{op}: got {', '.join(sorted(unknown))}; it takes the keywords of {name}.")
    check_rows(op, *qkv, segment_ids, positions)
    num_tokens = qkv[0].shape[1]
    if num_tokens % num_ranks:
        raise ValueError(
            f"{op}: T is {num_tokens} but {axis_name!r} has {num_ranks} devices, which need to "
            "divide it. Pad the arrays; segment 0 is padding."
        )
    exchange = ExchangeOptions(op, axis_name, implementation, deadline)
    options = AttentionOptions(exchange, **given)
    sequence = sharded_sequence(options, algorithm, schedule)
    sharding = NamedSharding(stopwatch.mesh, P(None, axis_name))
    segment_ids, positions = read_sequences(
        op,
        segment_ids,
        positions,
        layout=options.layout,
        num_ranks=num_ranks,
    )
    operands = jax.tree.map(lambda x: jax.device_put(x, sharding), (*qkv, segment_ids, positions))
    whole = stopwatch.program(partial(attend_sequence, sequence), 5 * [_ROWS], _ROWS)
    seconds, _ = stopwatch.run(whole, *operands)
    record = _StepRecord(stopwatch)
    out = _run_steps(sequence, record, *operands)
    return AttentionProfile(name, max(seconds), tuple(record.steps), tuple(record.spans), out)


class _StepRecord:
    """Runs steps in sequence, and times each on every rank."""

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch, self.steps, self.spans = stopwatch, [], []
        self._now = 0.0

    def step(self, name: str, **parts: Any) -> list[Any]:
        """Runs the parts, kind=(program, *operands), of one step; returns their results."""
        results, slowest = [], {COMMUNICATION: 0.0, COMPUTATION: 0.0}
        for kind, (program, *operands) in parts.items():
            seconds, result = self.stopwatch.run(program, *operands)
            results.append(result)
            slowest[kind] = max(seconds)
            self.spans += [Span(r, kind, name, self._now, s) for r, s in enumerate(seconds)]
        self.steps.append(StepProfile(name, **slowest))
        self._now += max(slowest.values())
        return results


# Axes that the ranks share: of rows, of chunks, of other arrays; `None` if all have the same.
_ROWS, _CHUNKS, _BLOCKS, _SCALAR = (1, 1, 0, None)


def _run_steps(sequence: ShardedSequence, record: _StepRecord, q, k, v, segment_ids, positions):
    """The forward pass of `rotating_attention`, with one program per step, equal for all steps."""
    num_tokens = q.shape[1] // sequence.num_ranks
    shape = q.shape[0], num_tokens
    rotation = sequence.rotation(
        *(jax.ShapeDtypeStruct((*shape, *x.shape[2:]), x.dtype) for x in (q, k, v))
    )
    program, run = record.stopwatch.program, record.stopwatch.run

    ranges = program(
        lambda ids, places: tuple(token_ranges(sequence, rotation, ids, places, shape)),
        [_ROWS, _ROWS],
        (_ROWS, _ROWS),
    )
    _, (start, end) = run(ranges, segment_ids, positions)
    place = program(
        lambda *arrays: to_layout(sequence, rotation, arrays), 3 * [_ROWS], 3 * (_ROWS,)
    )
    if sequence.rearranges:
        ((q, k, v),) = record.step("to zigzag", communication=(place, q, k, v))
    else:
        _, (q, k, v) = run(place, q, k, v)

    pair, softmax = 2 * (_CHUNKS,), OnlineSoftmax._make(3 * [_BLOCKS])

    def cut(q, k, v, start, end):
        queries, own = rotation.cut(q, k, v, start, end)
        return queries, own, OnlineSoftmax.of_nothing(queries, v.shape[3])

    _, (queries, own, seen) = run(
        program(cut, 5 * [_ROWS], (_BLOCKS, pair, softmax)), q, k, v, start, end
    )
    bring = program(rotation.bring, [pair, pair, _SCALAR], pair)
    attend = program(rotation.attend, [_BLOCKS, _ROWS, _ROWS, pair, softmax, _SCALAR], softmax)
    held = own
    for step in range(sequence.num_ranks):
        computing = {COMPUTATION: (attend, queries, start, end, held, seen, np.int32(step))}
        if step < rotation.last_step:
            bringing = {COMMUNICATION: (bring, own, held, np.int32(step))}
            held, seen = record.step(f"step {step}", **bringing, **computing)
        else:
            (seen,) = record.step(f"step {step}", **computing)
    _, out = run(
        program(lambda seen: rotation.result(seen)[0].astype(q.dtype), [softmax], _ROWS), seen
    )
    finish = program(lambda out: from_layout(sequence, out, num_tokens), [_ROWS], _ROWS)
    if not sequence.rearranges:
        return run(finish, out)[1]
    return record.step("from zigzag", communication=(finish, out))[0]
