"""The gate of multi_gpu.py: exchanges, GEMMs and attention over all GPUs give the right results.

Exchanges are compared bit for bit with XLA's collectives, GEMMs with XLA's product, attention with
dense attention that each process computes alone. If XLA's collectives served instead of a transport
of this package, the gate is closed, unless they are named. What follows a closed gate is not worth
measuring.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from multi_gpu_programs import Sizes, hosts, transport

from jax_cp_dispatch import available_implementations, place_tokens
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.tools.programs import (
    AXIS,
    GATHER,
    METHODS,
    SCATTER,
    TOLERANCE,
    ExchangeProgram,
    Product,
    Ranks,
    make_segment_ids,
    random_operands,
)

TOKENS_OF = P(None, AXIS)
DOCUMENTS: list[int] = [23, 41]  # tokens; of each rank


class Gate:
    """The section; raises ValueError at the first wrong result, or for another transport."""

    symmetric_bytes = 1 << 30

    def __init__(self, ranks: Ranks, sizes: Sizes):
        self._ranks, self._sizes = ranks, sizes

    def rows(self) -> Iterator[dict[str, Any]]:
        path, wanted = transport(), self._sizes.transport
        if path != wanted and (wanted or path == "xla"):
            reasons = {name: row.reason for name, row in available_implementations().items()}
            raise ValueError(
                f"the gate needs {wanted or 'a transport of this package'}, but {path} serves: "
                f"{reasons}. Correct that, or measure what serves: --transport {path}"
            )
        for what, check in (
            ("exchanges", self._exchanges),
            ("GEMMs", self._gemms),
            ("attention", self._attention),
        ):
            with warnings.catch_warnings():
                # Between hosts, XLA computes GEMMs.
                if path != "xla" and (what != "GEMMs" or len(set(hosts())) == 1):
                    warnings.filterwarnings("error", message="jax_cp_dispatch: .*XLA")
                check()
            yield {"what": what, "is_right": True, "path": path}

    def _exchanges(self) -> None:
        for tokens, feature in ((64, (3,)), (2048 if self._ranks.is_gpu else 128, (16, 128))):
            ExchangeProgram(self._ranks, tokens, feature, jnp.bfloat16).check()

    def _gemms(self) -> None:
        n = 16 * self._ranks.count
        for op, prefix in ((GATHER, ("none", "ring")), (SCATTER, ("none", "ring", "pipeline"))):
            methods = [name for name in METHODS if name.startswith(prefix)]
            if op == SCATTER or self._ranks.count % 2:
                methods.remove("ring pairs")
            Product(self._ranks, (op, 4 * n, 2 * n, 2 * n), self._sizes.dtype, methods).check()

    def _attention(self) -> None:
        """Forward, in the order of tokens and placed."""
        ranks, sizes = self._ranks, self._sizes
        lengths = DOCUMENTS * ranks.count
        ids, placement = make_segment_ids(lengths), place_tokens(lengths, world_size=ranks.count)
        q, k, v, _ = random_operands(
            sum(lengths), sizes.heads, sizes.head_size, sizes.dtype, kv_heads=sizes.kv_heads
        )
        mask = (ids[0][:, None] == ids[0])[None, None]
        dense = jax.jit(partial(jax.nn.dot_product_attention, mask=mask, is_causal=True))
        want = np.asarray(dense(*(x.astype(np.float32) for x in (q, k, v))))
        attend = partial(context_parallel_attention, mesh=ranks.mesh, axis_name=AXIS)
        for algorithm in dict.fromkeys((*sizes.causal, *sizes.packed)):
            is_placed = algorithm == "placed"
            order = placement.apply if is_placed else lambda x: x
            how: dict[str, Any] = {"segment_ids": ids}
            if is_placed:
                how = {"documents": placement.documents}
            given = [ranks.put(order(x), TOKENS_OF) for x in (q, k, v)]
            got = jax.jit(partial(attend, algorithm=algorithm, **how))(*given)
            expected = ranks.put(order(want), TOKENS_OF)
            ranks.check_equal(algorithm, got, expected, TOLERANCE[sizes.dtype])
