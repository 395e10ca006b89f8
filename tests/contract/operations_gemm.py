"""Further cases of the contract: layers beside attention in placed order."""

import numpy as np
import sequence_oracle
from contract import Case, Sizes
from on_mesh import AXIS
from operations import REPLICATED, TOKENS, _convolved, _documents, layer

import jax_cp_dispatch as cpd
from jax_cp_dispatch import sequence


def placed_layers() -> Case:
    """A convolution and a recurrence of documents that say where their tokens are."""
    conv = layer(
        sequence.causal_conv, {"x": (3,)}, _convolved, weights={"weight": (4, 3), "bias": (3,)}
    )
    recurrence = layer(
        sequence.linear_recurrence,
        {"x": (3,), "log_decay": (3,)},
        sequence_oracle.linear_recurrence,
    )
    parts, weights = {"conv": conv, "recurrence": recurrence}, ("weight", "bias")

    def place(sizes):
        ids = _documents(np.random.default_rng(0), sizes)
        return ids, cpd.place_tokens(segment_ids=ids, world_size=sizes.ranks)

    def by_tokens(reorder, arrays):
        """Reorders the arrays of tokens; weights have none."""
        tokens = {name: x for name, x in arrays.items() if name not in weights}
        return arrays | reorder(tokens)

    def draw(rng, sizes):
        arrays = conv.draw(rng, sizes) | recurrence.draw(rng, sizes)
        del arrays["ids"]
        _, placement = place(sizes)
        return {"documents": placement.documents, **by_tokens(placement.apply, arrays)}

    def call(arrays, **where):
        where["documents"] = arrays["documents"]
        of_part = lambda part: part.call({**arrays, "ids": None}, **where)["out"]
        return {name: of_part(part) for name, part in parts.items()}

    def oracle(arrays):
        arrays = dict(arrays)
        (plan,), (batch, num_tokens) = arrays.pop("documents").plans, arrays["x"].shape[:2]
        ranks = plan.kv_metadata.world_size
        ids, placement = place(Sizes(ranks, num_tokens // ranks, batch))
        packed = by_tokens(placement.restore, arrays) | {"ids": ids}
        found = {name: part.oracle(packed) for name, part in parts.items()}

        def pull(g):
            g, total = placement.restore(g), {}
            for name, (_, pull_part) in found.items():
                for array, gradient in pull_part({"out": g[name]}).items():
                    total[array] = total.get(array, 0) + gradient
            return by_tokens(placement.apply, total)

        return placement.apply({name: out["out"] for name, (out, _) in found.items()}), pull

    specs = dict.fromkeys(("x", "log_decay"), TOKENS) | dict.fromkeys(weights, REPLICATED)
    specs["documents"] = lambda documents: documents.specs(AXIS)
    return Case(
        "placed layers", call, oracle, draw, specs, dict.fromkeys(parts, TOKENS),
        op="(causal_conv|linear_recurrence)", has_batch=True,
        unlike={"nothing": "there is nothing to place"},
    )  # fmt: skip


CASES_GEMM = [placed_layers()]
