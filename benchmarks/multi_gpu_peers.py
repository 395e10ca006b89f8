"""Peers of multi_gpu.py, where they are installed: Transformer Engine's ring, and MaxText's steps.

Not yet run: no machine that has run this benchmark had them.
"""

import contextlib
import importlib.util
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from multi_gpu_sizes import Sizes

from jax_cp_dispatch.adapters import maxtext_attention
from jax_cp_dispatch.tools.programs import AXIS, Ranks

STEPS, WARM_UP = 12, 4
MOST_SEGMENTS = 32  # MaxText's synthetic documents of a row, and those that the ring accepts


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
