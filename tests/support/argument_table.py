"""What each algorithm of attention takes, found by trying: the table of docs/limits.md.

`python tests/support/argument_table.py` writes the table. Each cell traces one call, of 4 ranks.
"""

import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks

PAGE = pathlib.Path(__file__).parents[2] / "docs/limits.md"
BEGIN, END = "<!-- arguments:begin -->\n", "<!-- arguments:end -->"
ALGORITHMS = ("balanced", "placed", "ring", "zigzag", "hamilton", "ulysses", "auto", "local")
W, T, N, H = 4, 16, 4, 8
IDS = np.repeat([[1, 2]], T // 2, axis=1)
POSITIONS = np.tile(np.arange(T // 2, dtype=np.int32), (1, 2))
TRACED = "traced segment ids"

MASKS = {
    "Causal": masks.Causal(),
    "Full": masks.Full(),
    "SlidingWindow(left)": masks.SlidingWindow(4),
    "SlidingWindow(left, right)": masks.SlidingWindow(4, 4),
    "Chunked": masks.Chunked(4),
    "BlockCausal": masks.BlockCausal(4),
    "PrefixLM": masks.PrefixLM(POSITIONS < T // 4),
    "Blocks": masks.Blocks(np.repeat([[0, 1]], T // 2, axis=1)),
    "SharedPrefix": masks.SharedPrefix(np.repeat([[0, 1, 0, 2]], T // 4, axis=1)),
    "Tree": masks.Tree(np.repeat([[0, 1]], T // 2, axis=1), np.array([[-1, 0]])),
    "Ranges": masks.Ranges(np.zeros((1, T), np.int32), np.full((1, T), T, np.int32)),
}
OPTIONS = {
    "sink": {"sink": np.zeros(N, np.float32)},
    "return_lse": {"return_lse": True},
    "return_max_logits": {"return_max_logits": True},
    "logit_soft_cap": {"logit_soft_cap": 3.0},
    "expand, weights": {"expand": lambda w, x: (x @ w[0], x @ w[1]), "weights": np.ones((2, H, H))},
    'layout="zigzag"': {"layout": "zigzag"},
    "plan": {"plan": None},
    TRACED: {},
}


# For `local_attention`: it has all keys, in order, and always returns its lse.
MEANINGLESS = {"expand", "layout", "plan", "return_lse"}


def arrays(rows=T, kv_heads=N, value_size=H):
    of = lambda tokens, *size: np.zeros((1, tokens, *size), np.float32)
    return of(rows, N, H), of(T, kv_heads, H), of(T, kv_heads, value_size)


SHAPES = {
    "fewer KV heads": arrays(kv_heads=2),
    "values of another size": arrays(value_size=4),
    "tokens that the ranks do not divide": tuple(x[:, : T - 2] for x in arrays()),
    "fewer queries than keys": arrays(rows=4),
}


def call(algorithm, mask="causal", qkv=None, **options):
    """Traces one call; raises its error."""
    q, k, v = arrays() if qkv is None else qkv
    documents = {"segment_ids": IDS[:, : k.shape[1]], "positions": POSITIONS[:, : k.shape[1]]}
    if "sink" in options:
        options["sink"] = jnp.asarray(options["sink"])
    if algorithm == "local" and not options.keys().isdisjoint(MEANINGLESS):
        return None
    if options.get("layout") == "zigzag":
        order = cpd.zigzag_permutation(T, W)
        documents = {name: x[:, order] for name, x in documents.items()}
    if algorithm == "local":
        return jax.eval_shape(
            partial(cpd.local_attention, mask=mask, **documents, **options), q, k, v
        )
    mesh = jax.make_mesh((W,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    if algorithm == "placed":
        options["plan"] = cpd.place_tokens(world_size=W, mask=mask, **documents).plan
    elif "plan" in options:
        options["plan"] = cpd.plan_attention(world_size=W, mask=mask, **documents)
    if "expand" in options:
        k, v = np.zeros((1, T, N, H), np.float32), None
    attend = partial(
        cpd.context_parallel_attention,
        mesh=mesh, axis_name="cp", algorithm=algorithm, mask=mask, batch_axis=(), head_axis=(),
        **documents, **options,
    )  # fmt: skip
    return jax.eval_shape(attend, q, k, *([] if v is None else [v]))


def with_traced_ids(algorithm):
    """Traces a call whose ids are not known on the host."""
    mesh = jax.make_mesh((W,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = arrays()
    plan: dict[str, Any] = {}
    if algorithm == "placed":
        plan = {"plan": cpd.place_tokens(segment_ids=IDS, world_size=W).plan}

    def attend(ids):
        if algorithm == "local":
            return cpd.local_attention(*map(jnp.asarray, (q, k, v)), mask="causal", segment_ids=ids)
        return cpd.context_parallel_attention(
            *(q, k, v), mesh=mesh, axis_name="cp", algorithm=algorithm, segment_ids=ids,
            batch_axis=(), head_axis=(), **plan,
        )  # fmt: skip

    return jax.eval_shape(attend, IDS)


def rows():
    """Yields each row's name, and a function that tries it with an algorithm."""
    for name, mask in MASKS.items():
        yield f"`masks.{name}`", partial(call, mask=mask)
    for name, options in OPTIONS.items():
        if name == TRACED:
            yield name, with_traced_ids
        else:
            yield f"`{name}`", partial(call, **options)
    for name, qkv in SHAPES.items():
        yield name, partial(call, qkv=qkv)


def cell(attempt, algorithm) -> tuple[str, str]:
    """Returns yes, no, or a dash for what has no meaning, and the error."""
    try:
        return ("–" if attempt(algorithm) is None else "yes"), ""
    except (TypeError, ValueError, NotImplementedError) as error:
        return "no", str(error)


def table() -> tuple[str, list[str]]:
    """Returns the table, and all errors."""
    lines = [f"| | {' | '.join(ALGORITHMS)} |", "|---" * (1 + len(ALGORITHMS)) + "|"]
    errors, by_all = [], []
    for name, attempt in rows():
        cells, found = zip(*(cell(attempt, algorithm) for algorithm in ALGORITHMS), strict=True)
        errors += [x for x in found if x]
        if set(cells) == {"yes"}:
            by_all.append(name)
        else:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([f"Supported by all: {', '.join(by_all)}.", "", *lines, ""]), errors


def page(shown: str) -> str:
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}{shown}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    from jax_cp_dispatch.cpu_devices import start_cpu_devices

    start_cpu_devices(W)
    PAGE.write_text(page(table()[0]))
