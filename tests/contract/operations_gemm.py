"""Further cases of the contract: layers in placed order, and `gemm` with a fused GELU."""

import jax.numpy as jnp
import numpy as np
import sequence_oracle
from contract import Case, Sizes
from on_mesh import AXIS
from operations import REPLICATED, TOKENS, _convolved, _documents, layer
from scaled_gemm_cases import gelu, gelu_derivative

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
    specs = {**specs, "documents": lambda documents: documents.specs(AXIS)}
    return Case(
        "placed layers", call, oracle, draw, specs, dict.fromkeys(parts, TOKENS),
        op="(causal_conv|linear_recurrence)", has_batch=True,
        unlike={"nothing": "there is nothing to place"},
    )  # fmt: skip


def gemm_and_gelu() -> Case:
    """A product on one device, and its GELU."""
    names = "x", "w", "bias"

    def draw(rng, sizes):
        rows = sizes.ranks * sizes.tokens
        shapes = dict(zip(names, ((rows, 5), (5, 7), (7,)), strict=True))
        return {name: rng.normal(size=shape) for name, shape in shapes.items()}

    def call(arrays):
        x, w, bias = (jnp.asarray(arrays[name]) for name in names)
        out, before = cpd.gemm(x, w, bias=bias, fuse_gelu=True)
        return {"out": out, "before": before}

    def oracle(arrays):
        x, w, bias = (arrays[name] for name in names)
        before = x @ w + bias

        def pull(g):
            of_before = g["before"] + g["out"] * gelu_derivative(before)
            gradients = of_before @ w.T, x.T @ of_before, of_before.sum(0)
            return dict(zip(names, gradients, strict=True))

        return {"out": gelu(before), "before": before}, pull

    specs, results = (dict.fromkeys(x, REPLICATED) for x in (names, ("out", "before")))
    return Case("gemm", call, oracle, draw, specs, results, is_local=True)


CASES_GEMM = [placed_layers(), gemm_and_gelu()]
