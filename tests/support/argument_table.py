"""What each algorithm of attention takes, found by trying: the table of docs/limits.md.

`python tests/support/argument_table.py` writes the table. Each cell traces one call, of 4 ranks.
"""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks

PAGE = pathlib.Path(__file__).parents[2] / "docs/limits.md"
BEGIN, END = "<!-- arguments:begin -->\n", "<!-- arguments:end -->"
KINDS = cpd.Ring, cpd.Zigzag, cpd.Halo, cpd.Hamilton, cpd.Ulysses, cpd.Balanced, cpd.Placed
ALGORITHMS = (*(kind.name for kind in KINDS), "auto", "local")
W, T, N, H = 4, 16, 4, 8
IDS = np.repeat([[1, 2]], T // 2, axis=1)
POSITIONS = np.tile(np.arange(T // 2, dtype=np.int32), (1, 2))
CAUSAL = masks.Causal()

MASKS = {
    "Causal": CAUSAL,
    "Full": masks.Full(),
    "SlidingWindow(left)": masks.SlidingWindow(4),
    "SlidingWindow(left, right)": masks.SlidingWindow(4, 4),
    "SlidingWindow(left, first)": masks.SlidingWindow(4, first=2),
    "Chunked": masks.Chunked(4),
    "BlockCausal": masks.BlockCausal(4),
    "PrefixLM": masks.PrefixLM(POSITIONS < T // 4),
    "Blocks": masks.Blocks(np.repeat([[0, 1]], T // 2, axis=1)),
    "BlockDiffusion": masks.BlockDiffusion(IDS, 2),
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
}
ORDERS = ("packed", "zigzag", "placed")


# For `local_attention`, as an order: it has all keys, in packed order, and always returns its lse.
MEANINGLESS = {"expand", "return_lse"}


def arrays(rows=T, kv_heads=N, value_size=H):
    of = lambda tokens, *size: np.zeros((1, tokens, *size), np.float32)
    return of(rows, N, H), of(T, kv_heads, H), of(T, kv_heads, value_size)


SHAPES = {
    "fewer KV heads": arrays(kv_heads=2),
    "values of another size": arrays(value_size=4),
    "tokens that the ranks do not divide": tuple(x[:, : T - 2] for x in arrays()),
    "fewer queries than keys": arrays(rows=4),
}


def documents_in(order, num_columns=T, mask=CAUSAL):
    """Returns documents in an order, and the mask of their tokens."""
    columns = slice(num_columns)
    documents = cpd.Documents(IDS[:, columns], POSITIONS[:, columns])
    if order == "zigzag":
        documents = documents.zigzag(W)
        return documents, documents.apply(mask)
    if order == "placed":
        given = {"segment_ids": documents.segment_ids, "positions": documents.positions}
        placement = cpd.place_tokens(world_size=W, mask=mask, **given)
        return placement.documents, placement.apply(mask)
    return documents, mask


def order_of(algorithm):
    return "placed" if algorithm == "placed" else "packed"


def call(algorithm, mask=CAUSAL, qkv=None, order=None, is_traced=False, **options):
    """Traces one call; raises its error. Traced documents are not known on the host."""
    q, k, v = arrays() if qkv is None else qkv
    if "sink" in options:
        options["sink"] = jnp.asarray(options["sink"])
    if algorithm == "local" and (order or not options.keys().isdisjoint(MEANINGLESS)):
        return None
    documents, mask = documents_in(order or order_of(algorithm), k.shape[1], mask)
    if algorithm == "local":
        attend = partial(cpd.local_attention, mask=mask, **options)
    else:
        mesh = jax.make_mesh((W,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
        where = {"mesh": mesh, "axis_name": "cp", "batch_axis": (), "head_axis": ()}
        given = {"algorithm": algorithm, "mask": mask, **where, **options}
        attend = partial(cpd.context_parallel_attention, **given)
    operands = (q, np.zeros((1, T, N, H), np.float32)) if "expand" in options else (q, k, v)
    if is_traced:
        operands = tuple(map(jnp.asarray, operands))
        return jax.eval_shape(lambda documents: attend(*operands, documents=documents), documents)
    return jax.eval_shape(partial(attend, documents=documents), *operands)


def rows():
    """Yields each row's name, and a function that tries it with an algorithm."""
    for name, mask in MASKS.items():
        yield f"`masks.{name}`", partial(call, mask=mask)
    for name, options in OPTIONS.items():
        yield f"`{name}`", partial(call, **options)
    for order in ORDERS:
        yield f"tokens in {order} order", partial(call, order=order)
    yield "traced documents", partial(call, is_traced=True)
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
