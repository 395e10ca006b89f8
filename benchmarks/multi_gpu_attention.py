"""Attention over all GPUs: one causal document, or packed ones with published lengths.

Efficiency compares with one GPU that attends alone to as many tokens as each GPU holds, by the same
kernels: TFLOP/s of each of all GPUs over those of the one.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from multi_gpu_peers import transformer_engine_attention
from multi_gpu_programs import Program, failing, symmetric_bytes, timed
from multi_gpu_sizes import Sizes

from jax_cp_dispatch import Documents, PlanConfig, local_attention, place_tokens, plan_attention
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.cost import attention_flops, count_pairs
from jax_cp_dispatch.tools.programs import AXIS, TOLERANCE, Ranks, gradients, make_segment_ids

TOKENS_OF = P(None, AXIS)
PASSES = {"forward": 3, "forward and backward": 4}  # operands of q, k, v and the cotangent
ONE = "one GPU alone"
PEER = "Transformer Engine's ring"


def published_lengths(total: int) -> list[int]:
    """Draws documents of tests/data/packed, with a seed; the last one is cut."""
    batches = json.loads((common.ROOT / "tests/data/packed/wlbllm.json").read_text())
    documents = np.concatenate([batch["lengths"][:-1] for batch in batches])
    drawn = np.random.default_rng(total).choice(documents, total // documents.min() + 1)
    ends = np.minimum(np.cumsum(drawn), total)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0].tolist()


class Attention:
    """The section of one case, "causal" or "packed", and one number of tokens per GPU."""

    def __init__(self, case: str, tokens: int, ranks: Ranks, sizes: Sizes):
        self._ranks, self._sizes, self._case, self._tokens = ranks, sizes, case, tokens
        draw = (lambda n: [n]) if case == "causal" else published_lengths
        self._lengths, alone = draw(ranks.count * tokens), draw(tokens)
        self._pairs = {name: float(sum(count_pairs(0, n) for n in lengths)) for name, lengths in
                       (("all", self._lengths), (ONE, alone))}  # fmt: skip
        whole = NamedSharding(ranks.mesh, TOKENS_OF)
        device = SingleDeviceSharding(jax.local_devices()[0])
        self._shapes = {
            "all": _operands(ranks.count * tokens, sizes, whole),
            ONE: _operands(tokens, sizes, device),
        }
        self._programs: dict[tuple[str, str], Program] = {}
        self._documents: dict[str, Documents] = {}  # with plans
        for algorithm in sizes.causal if case == "causal" else sizes.packed:
            self._add(algorithm, self._ours(algorithm))
        self._add(ONE, _alone(alone))

    @property
    def symmetric_bytes(self) -> int:
        return symmetric_bytes(self._programs.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        if self._case == "packed":
            try:
                ids = make_segment_ids(self._lengths)
                self._add(PEER, transformer_engine_attention(self._ranks.mesh, ids))
            except Exception as error:
                yield {"what": PEER, "left_out": f"{type(error).__name__}: {error}"}
        drawn = {where: [_draw(shape) for shape in shapes] for where, shapes in
                 self._shapes.items()}  # fmt: skip
        put = self._ranks.put_documents
        documents = {name: put(planned) for name, planned in self._documents.items()}
        runs, programs = {}, {}
        for (name, what), program in self._programs.items():
            operands = drawn[ONE if name == ONE else "all"][: PASSES[what]]
            run = partial(program, *operands, documents.get(name))
            runs[f"{name}, {what}"], programs[f"{name}, {what}"] = run, (name, what)
        for what, error in failing(runs).items():
            yield {"what": what, "tokens_per_gpu": self._tokens, "error": error}
            del runs[what], programs[what]
        self._check({programs[name]: run for name, run in runs.items()})
        found = timed(runs, self._sizes.rounds)
        rates = {
            programs[name]: self._flops(*programs[name]) / times["us"] / 1e6
            for name, times in found.items()
        }
        for what, times in found.items():
            of = programs[what]
            alone = rates.get((ONE, of[1]))
            yield {
                **{"what": what, "case": self._case, "tokens_per_gpu": self._tokens},
                **times,
                "TFLOP_per_s_per_gpu": rates[of],
                "efficiency": rates[of] / alone if alone else None,
                "path": self._programs[of].path,
            }

    def _add(self, name: str, attend: Callable[..., Any]) -> None:
        """Adds both passes of a function of q, k, v and its documents, None without a plan."""

        def both(q, k, v, g, documents):
            return gradients(lambda q, k, v: attend(q, k, v, documents))(q, k, v, g)

        shapes = self._shapes[ONE if name == ONE else "all"]
        documents = self._documents.get(name)
        if documents is not None:
            shapes_of = partial(_shapes_like, self._ranks.mesh)
            documents = jax.tree.map(shapes_of, documents.specs(AXIS), documents)
        for what, fn in zip(PASSES, (attend, both), strict=True):
            self._programs[name, what] = Program(jax.jit(fn), *shapes[: PASSES[what]], documents)

    def _ours(self, algorithm: str) -> Callable[..., Any]:
        ids = make_segment_ids(self._lengths)
        ranks, sizes = self._ranks, self._sizes
        given: dict[str, Any] = {} if self._case == "causal" else {"segment_ids": ids}
        if algorithm == "placed":
            placement = place_tokens(self._lengths, world_size=ranks.count)
            self._documents[algorithm] = placement.documents
        if algorithm == "balanced":
            config = PlanConfig(num_heads=sizes.heads, num_kv_heads=sizes.kv_heads)
            plan = plan_attention(lengths=self._lengths, world_size=ranks.count, config=config)
            self._documents[algorithm] = Documents(ids).with_plan(plan)

        def attend(q, k, v, documents):
            options = given if documents is None else {"documents": documents}
            return context_parallel_attention(
                *(q, k, v), mesh=ranks.mesh, axis_name=AXIS, algorithm=algorithm, **options
            )

        return attend

    def _flops(self, name: str, what: str) -> float:
        """FLOPs of each GPU."""
        pairs = self._pairs[ONE] if name == ONE else self._pairs["all"] / self._ranks.count
        sizes = {"num_heads": self._sizes.heads, "head_size": self._sizes.head_size}
        of = partial(attention_flops, pairs, **sizes)
        return of(backward=False) + (of(backward=True) if what != "forward" else 0)

    def _check(self, runs: dict[tuple[str, str], Any]) -> None:
        """Compares algorithms that keep the order of tokens; raises ValueError if they differ."""
        difference = jax.jit(lambda a, b: abs(a - b).max() / abs(b).max())
        moved = ("placed", ONE, PEER)  # other orders of tokens
        for what in PASSES:
            kept = [name for name, of in runs if of == what and name not in moved]
            if len(kept) < 2:
                continue
            first, *others = kept
            want = jax.tree.leaves(runs[first, what]())
            for name in others:
                for got, expected in zip(jax.tree.leaves(runs[name, what]()), want, strict=True):
                    found = float(difference(*(x.astype(jnp.float32) for x in (got, expected))))
                    if not found <= TOLERANCE[self._sizes.dtype]:
                        raise ValueError(f"{name} and {first}, {what}, differ by {found:.1e}")


def _operands(tokens: int, sizes: Sizes, sharding: Any) -> list[Any]:
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
    shape = lambda n: (1, tokens, n, sizes.head_size)
    return [jax.ShapeDtypeStruct(shape(n), sizes.dtype, sharding=sharding) for n in heads]


def _shapes_like(mesh: Mesh, spec: P, part: Any) -> Any:
    """Returns the shapes of a pytree of host arrays, sharded over the mesh."""
    sharding = NamedSharding(mesh, spec)
    like = lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding)
    return jax.tree.map(like, part)


def _draw(shape: Any) -> jax.Array:
    """Draws on the devices: hosts have no room for all tokens."""
    draw = partial(jax.random.normal, shape=shape.shape, dtype=shape.dtype)
    return jax.jit(draw, out_shardings=shape.sharding)(jax.random.key(shape.shape[2]))


def _alone(lengths: list[int]) -> Callable[..., Any]:
    ends = np.cumsum(lengths)
    starts = np.repeat(ends - lengths, lengths)[None].astype(np.int32)

    def attend(q, k, v, documents):
        last = jnp.arange(q.shape[1], dtype=jnp.int32)[None] + 1
        return local_attention(q, k, v, jnp.asarray(starts), last)[0]

    return attend
