"""Attention over all GPUs: one causal document, or packed ones; training steps of MaxText.

Efficiency compares with one GPU that attends alone to as many tokens as each GPU holds, by the same
kernels: TFLOP/s of each of all GPUs over those of the one. Peers are measured where they are
installed: no machine that has run this benchmark had them.
"""

import contextlib
import importlib.util
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from multi_gpu_programs import Program, Sizes, failing, symmetric_bytes, timed

from jax_cp_dispatch import Documents, PlanConfig, local_attention, place_tokens, plan_attention
from jax_cp_dispatch.adapters import maxtext_attention
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.cost import attention_flops, count_pairs
from jax_cp_dispatch.tools.programs import AXIS, TOLERANCE, Ranks, gradients, make_segment_ids

TOKENS_OF = P(None, AXIS)
PASSES = {"forward": 3, "forward and backward": 4}  # operands of q, k, v and the cotangent
ONE = "one GPU alone"
PEER = "Transformer Engine's ring"
STEPS, WARM_UP = 12, 4  # of MaxText
MOST_SEGMENTS = 32  # MaxText's synthetic documents of a row, and those that the ring accepts


def published_lengths(total: int) -> list[int]:
    """Draws documents of tests/data/packed, with a seed; the last one is cut."""
    batches = json.loads((common.ROOT / "tests/data/packed/wlbllm.json").read_text())
    documents = np.concatenate([batch["lengths"][:-1] for batch in batches])
    drawn = np.random.default_rng(total).choice(documents, total // documents.min() + 1)
    ends = np.minimum(np.cumsum(drawn), total)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0].tolist()


class Attention:
    """The section "CASE TOKENS" of a case, "causal" or "packed", and a number of tokens per GPU.

    "CASE TOKENS ALGORITHM" has one algorithm, and one GPU alone.
    """

    def __init__(self, name: str, ranks: Ranks, sizes: Sizes):
        case, number, *only = name.split()
        tokens = int(number)
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
        algorithms = sizes.causal if case == "causal" else sizes.packed
        self._has_peer = case == "packed" and only in ([], [algorithms[0]])
        for algorithm in only or algorithms:
            self._add(algorithm, self._ours(algorithm))
        self._add(ONE, _alone(alone))

    @property
    def symmetric_bytes(self) -> int:
        return symmetric_bytes(self._programs.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        if self._has_peer:
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
        wide = lambda x: x.astype(jnp.float32)  # fused: no array of this type is made
        difference = jax.jit(lambda a, b: abs(wide(a) - wide(b)).max() / abs(wide(b)).max())
        moved = ("placed", ONE, PEER)  # other orders of tokens
        for what in PASSES:
            kept = [name for name, of in runs if of == what and name not in moved]
            if len(kept) < 2:
                continue
            first, *others = kept
            want = jax.tree.leaves(runs[first, what]())
            for name in others:
                for got, expected in zip(jax.tree.leaves(runs[name, what]()), want, strict=True):
                    found = float(difference(got, expected))
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


# ---- Peers.


def transformer_engine_attention(mesh: Any, ids: np.ndarray) -> Callable[..., Any]:
    """Returns attention of packed documents by Transformer Engine's ring (THD).

    It needs striped tokens: rank r holds those whose number is r modulo W. Operands are random, so
    only the ids and positions are put in that order.

    Raises:
      ImportError: it is not installed.
    """
    from transformer_engine.jax import attention as te  # pyright: ignore[reportMissingImports]
    from transformer_engine.jax.sharding import (  # pyright: ignore[reportMissingImports]
        MeshResource,
        global_shard_guard,
    )

    starts = np.flatnonzero(np.diff(ids[0], prepend=0))
    lengths = np.diff(np.append(starts, ids.shape[1]))
    positions = np.arange(ids.shape[1]) - np.repeat(starts, lengths)
    striped = lambda x: jnp.asarray(x.reshape(-1, mesh.size).T.reshape(1, -1), jnp.int32)
    order = te.SequenceDescriptor.from_segment_ids_and_pos(
        (striped(ids[0]), striped(ids[0])), (striped(positions), striped(positions))
    )

    def attend(q, k, v, plan):
        with jax.set_mesh(mesh), global_shard_guard(MeshResource(cp_resource=AXIS)):
            return te.fused_attn(
                (q, k, v), None, order, None, te.AttnBiasType.NO_BIAS,
                te.AttnMaskType.PADDING_CAUSAL_MASK, te.QKVLayout.THD_THD_THD,
                te.AttnSoftmaxType.VANILLA_SOFTMAX, q.shape[-1] ** -0.5, 0.0, True,
                max_segments_per_seq=len(lengths),
                context_parallel_strategy=te.CPStrategy.RING,
                context_parallel_causal_load_balanced=True, context_parallel_axis=AXIS,
                stripe_size=1,
            )  # fmt: skip

    return attend


class MaxText:
    """The section: tokens per second of MaxText's training loop, with its ring and with ours."""

    symmetric_bytes = 1 << 30  # rings of its layers use XLA's collectives

    def __init__(self, ranks: Ranks, sizes: Sizes):
        self._ranks, self._tokens = ranks, sizes.tokens[0]
        width = sizes.heads * sizes.head_size
        self._model = {
            **{"base_num_decoder_layers": 4, "base_emb_dim": width, "base_mlp_dim": 3 * width},
            **{"base_num_query_heads": sizes.heads, "base_num_kv_heads": sizes.kv_heads},
            **{"head_dim": sizes.head_size},
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        if importlib.util.find_spec("maxtext") is None:
            yield {"what": "MaxText", "left_out": "it is not installed: see docs/maxtext.md"}
            return
        has_ring = importlib.util.find_spec("transformer_engine") is not None
        own = {"attention": "cudnn_flash_te", "context_parallel_strategy": "ring"}
        cases = {
            "MaxText, its ring (Transformer Engine)": (own, None) if has_ring else None,
            "MaxText, zigzag": ({"attention": "dot_product"}, "zigzag"),
        }
        for what, case in cases.items():
            if case is None:
                yield {"what": what, "left_out": "Transformer Engine is not installed"}
                continue
            options, algorithm = case
            attention = maxtext_attention(algorithm=algorithm) if algorithm else None
            with attention or contextlib.nullcontext():
                rates = self._tokens_per_second(options)
            yield {"what": what, "tokens_per_gpu": self._tokens,
                   "tokens_per_s_per_gpu": statistics.median(rates), "steps": len(rates),
                   "path": algorithm or "ring"}  # fmt: skip

    def _tokens_per_second(self, options: dict[str, Any]) -> list[float]:
        """Runs a few steps on synthetic packed documents; returns those of each timed step."""
        from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

        W = self._ranks.count
        with tempfile.TemporaryDirectory() as folder:
            metrics = pathlib.Path(folder, "metrics.txt")
            given = {
                **{"run_name": "bench", "base_output_directory": folder, "log_config": False},
                **{"skip_jax_distributed_system": True, "enable_checkpointing": False},
                **{"hardware": "gpu" if self._ranks.is_gpu else "cpu", "steps": STEPS},
                **{"dataset_type": "synthetic", "packing": True, "vocab_size": 32768},
                **{"max_segments_per_seq": MOST_SEGMENTS, "metrics_file": str(metrics)},
                **{"ici_context_parallelism": W, "per_device_batch_size": 1 / W},
                **{"max_target_length": self._tokens * W, "remat_policy": "minimal"},
                **(self._model | options),
            }
            train.main(["train", *(f"{name}={value}" for name, value in given.items())])
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["perf/per_device_tokens_per_sec"] for line in lines[WARM_UP:]]
