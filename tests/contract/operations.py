"""The operations of the contract: one case each, with what it computes in NumPy."""

import dataclasses
from functools import partial
from typing import Any

import attention_oracle
import experts_oracle
import jax
import jax.numpy as jnp
import mask_oracle
import movement_oracle
import numpy as np
import selected_oracle
import sequence_oracle
from contract import DATA, Case, Sizes
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS
from packed_batches import pack
from scaled_gemm_cases import gelu, gelu_derivative

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts, masks, selected, sequence

TOKENS = P(DATA, AXIS)  # of arrays [B, T, ...]
ROWS = P(AXIS, DATA)  # of arrays [T, features]
REPLICATED = P()


def _documents(rng, sizes):
    """Returns segment ids [B, T], with padding and with documents of several ranks."""
    num_tokens = sizes.ranks * sizes.tokens
    ids = pack(rng, sizes.batch, num_tokens, max_length=max(2, num_tokens // 2))[0]
    ids[:1, :2] = ids[-1:, -3:] = 0
    return ids


def _normal(rng, before, shapes):
    return {name: rng.normal(size=(*before, *shape)) for name, shape in shapes.items()}


# ---- Attention.

QKV = {"q": (4, 4), "k": (2, 4), "v": (2, 6)}  # heads, features


def _draw_qkv(rng, sizes):
    ids = _documents(rng, sizes)
    return {"segment_ids": ids, **_normal(rng, ids.shape, QKV)}


def _dense(arrays, ids, mask):
    """Returns the output, and its pull back."""
    (q, k, v), pairs = (arrays[x] for x in "qkv"), mask_oracle.batch_pairs(mask, ids)
    out, lse = attention_oracle.masked_attention(q, k, v, pairs)

    def pull(g):
        none = np.zeros_like(lse)
        found = attention_oracle.masked_attention_gradients(q, k, v, pairs, g, none)
        return dict(zip("qkv", found, strict=True))

    return out, pull


def attention(algorithm: Any, mask: Any = "causal", **of) -> Case:
    def call(arrays, **where):
        qkv = (arrays[x] for x in "qkv")
        options = {"segment_ids": arrays["segment_ids"], "algorithm": algorithm, "mask": mask}
        return {"out": cpd.context_parallel_attention(*qkv, **options, **where)}

    def oracle(arrays):
        out, pull = _dense(arrays, arrays["segment_ids"], mask)
        return {"out": out}, lambda g: pull(g["out"])

    name = algorithm if isinstance(algorithm, str) else type(algorithm).__name__.lower()
    specs = dict.fromkeys((*"qkv", "segment_ids"), TOKENS)
    case = Case(
        name, (cpd.context_parallel_attention,), call, oracle, _draw_qkv, specs, {"out": TOKENS},
        ids=("segment_ids",), has_batch=True,
    )  # fmt: skip
    return dataclasses.replace(case, **of)


def placed_attention() -> Case:
    """Documents that are known on the host say where their tokens are."""

    def place(sizes):
        ids = _documents(np.random.default_rng(0), sizes)
        return ids, cpd.place_tokens(segment_ids=ids, world_size=sizes.ranks)

    def draw(rng, sizes):
        ids, placement = place(sizes)
        qkv = placement.apply(_normal(rng, ids.shape, QKV))
        return {"documents": placement.documents, **qkv}

    def call(arrays, **where):
        options = {"documents": arrays["documents"], "algorithm": "placed", **where}
        return {"out": cpd.context_parallel_attention(*(arrays[x] for x in "qkv"), **options)}

    def oracle(arrays):
        (plan,), (batch, num_tokens) = arrays["documents"].plans, arrays["q"].shape[:2]
        ranks = plan.kv_metadata.world_size
        ids, placement = place(Sizes(ranks, num_tokens // ranks, batch))
        out, pull = _dense(placement.restore({x: arrays[x] for x in "qkv"}), ids, "causal")
        apply, restore = placement.apply, placement.restore
        return {"out": apply(out)}, lambda g: apply(pull(restore(g["out"])))

    unlike = {"nothing": "there is nothing to place"}
    case = attention("placed", call=call, oracle=oracle, draw=draw, ids=(), unlike=unlike)
    of_documents = lambda documents: documents.specs(AXIS)
    return dataclasses.replace(case, specs={**case.specs, "documents": of_documents})


def latent_attention() -> Case:
    """Keys and values of DeepSeek's kind: products of rows of latents, on the rank that attends."""

    def draw(rng, sizes):
        ids = _documents(rng, sizes)
        arrays = _normal(rng, ids.shape, {"q": (4, 4), "latents": (5,)})
        return {"segment_ids": ids, **arrays, **_normal(rng, (5,), {"wk": (2, 4), "wv": (2, 6)})}

    def expand(weights, rows):
        return tuple(jnp.einsum("rl,lnh->rnh", rows, weights[x]) for x in ("wk", "wv"))

    def call(arrays, **where):
        out = cpd.context_parallel_attention(
            arrays["q"], arrays["latents"], segment_ids=arrays["segment_ids"], algorithm="ulysses",
            expand=expand, weights={x: arrays[x] for x in ("wk", "wv")}, **where,
        )  # fmt: skip
        return {"out": out}

    def oracle(arrays):
        latents, wk, wv = (arrays[x] for x in ("latents", "wk", "wv"))
        project = lambda w: np.einsum("btl,lnh->btnh", latents, w)
        out, pull = _dense(
            {**arrays, "k": project(wk), "v": project(wv)}, arrays["segment_ids"], "causal"
        )

        def pull_latents(g):
            found = pull(g["out"])
            pairs = (found["k"], wk), (found["v"], wv)
            of_weights = [np.einsum("btl,btnh->lnh", latents, x) for x, _ in pairs]
            of_latents = sum(np.einsum("btnh,lnh->btl", x, w) for x, w in pairs)
            names = "q", "latents", "wk", "wv"
            return dict(zip(names, (found["q"], of_latents, *of_weights), strict=True))

        return {"out": out}, pull_latents

    specs = dict.fromkeys(("q", "latents", "segment_ids"), TOKENS) | dict.fromkeys(
        ("wk", "wv"), REPLICATED
    )
    return Case(
        "latents", (cpd.context_parallel_attention,), call, oracle, draw, specs, {"out": TOKENS},
        ids=("segment_ids",), has_batch=True,
    )  # fmt: skip


def selected_attention() -> Case:
    """An index picks keys, attention reads these alone, and the index learns from it."""
    index = {"q_index": (2, 3), "k_index": (3,), "weights": (2,)}

    def draw(rng, sizes):
        drawn = _draw_qkv(rng, sizes)
        integers = lambda shape: rng.integers(-2, 3, (*drawn["q"].shape[:2], *shape))
        of_index = {name: integers(shape).astype(np.float64) for name, shape in index.items()}
        return {**drawn, **of_index}  # whose scores have no roundings

    def call(arrays, **where):
        qkv, of_index = [arrays[x] for x in "qkv"], [arrays[x] for x in index]
        where |= {"segment_ids": arrays["segment_ids"], "algorithm": "halo"}
        picks = selected.select_keys(*of_index, num_keys=3, **where)
        mask, has_picks = masks.Selected(picks), (picks >= -1).all()
        # So the exchanges of the others, also of ids, cannot begin before it.
        later = qkv, of_index, where["segment_ids"]
        later = jax.tree.map(lambda x: jnp.where(has_picks, x, jnp.zeros_like(x)), later)
        qkv, of_index, where["segment_ids"] = later
        out = cpd.context_parallel_attention(*qkv, mask=mask, **where)
        where.pop("head_axis", None)
        loss = selected.index_loss(*of_index, q=qkv[0], k=qkv[1], mask=mask, **where)
        return {"out": out, "loss": loss.astype(out.dtype)}

    def oracle(arrays):
        qkv, ids = [arrays[x] for x in "qkv"], arrays["segment_ids"]
        of_index = [arrays[x][:, :, None] for x in index]
        options: Any = {"num_keys": 3, "block": 1, "pool": "max", "local": False}
        picks = selected_oracle.select(*of_index, segment_ids=ids, mask="causal", **options)
        seen = selected_oracle.pairs(picks, ids, "causal", 1)
        out, _, pull = selected_oracle.attention(qkv, seen)
        loss, pull_loss = selected_oracle.index_loss(of_index, qkv[:2], ids, seen)

        def gradients(g):
            of_index = [x[:, :, 0] for x in pull_loss(g["loss"])]
            return dict(zip(("q", "k", "v", *index), (*pull(g["out"]), *of_index), strict=True))

        return {"out": out, "loss": loss}, gradients

    functions = selected.select_keys, cpd.context_parallel_attention, selected.index_loss
    specs = dict.fromkeys((*"qkv", *index, "segment_ids"), TOKENS)
    results = {"out": TOKENS, "loss": TOKENS}
    of: Any = {"call": call, "oracle": oracle, "draw": draw, "functions": functions}
    return attention("halo", name="selected", specs=specs, results=results, **of)


def local_attention() -> Case:
    def call(arrays):
        q, k, v = (jnp.asarray(arrays[x]) for x in "qkv")
        options: Any = {
            "segment_ids": arrays["segment_ids"],
            "mask": "causal",
            "out_dtype": q.dtype,
        }
        return {"out": cpd.local_attention(q, k, v, **options)[0]}

    functions = (cpd.local_attention,)
    case = attention("ring", name="local_attention", functions=functions, call=call)
    return _without_ranks(case)


def _without_ranks(case: Case) -> Case:
    specs, results = (dict.fromkeys(x, REPLICATED) for x in (case.specs, case.results))
    return dataclasses.replace(case, specs=specs, results=results, is_local=True)


# ---- Layers beside attention.


class RunningSum:
    """A user's kernel for `sequence.recurrence`: the sum of a document up to each token."""

    def summary(self, inputs):
        return inputs.sum((0, 1))

    def apply(self, map_, state):
        return map_ if state is None else state + map_

    def run(self, inputs, states, piece_ids):
        same = (piece_ids[:, :, None] == piece_ids[:, None]) & (piece_ids > 0)[:, None]
        before = jnp.tril(same).astype(inputs.dtype)
        within = jnp.einsum("bts,bsf->btf", before, inputs, precision="highest")
        return within + states[jnp.minimum(piece_ids, len(states) - 1)]


def layer(function, shapes, oracle, *operands, weights=None, like="x", **options) -> Case:
    """`oracle` maps arrays of one document, and the cotangent, to its output and gradients."""
    weights = weights or {}

    def draw(rng, sizes):
        ids = _documents(rng, sizes)
        arrays = _normal(rng, ids.shape, shapes) | _normal(rng, (), weights)
        if "k" in arrays:
            arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
        if "log_decay" in arrays:
            arrays["log_decay"] = -np.abs(arrays["log_decay"])
        if "beta" in arrays:
            arrays["beta"] = 1 / (1 + np.exp(arrays["beta"]))
        return {"segment_ids": ids, **arrays}

    def call(arrays, **where):
        tokens = (arrays[x] for x in (*shapes, *weights))
        given = {"segment_ids": arrays["segment_ids"], **options, **where}
        return {"out": function(*tokens, *operands, **given)}

    def of_batch(arrays):
        shape = arrays[like].shape

        def run(g):
            out = np.zeros(shape)
            found = {x: np.zeros(arrays[x].shape) for x in (*shapes, *weights)}
            for row, a, b in sequence_oracle.documents(arrays["segment_ids"]):
                rows = [arrays[x][row, a:b] for x in shapes]
                results = oracle(*rows, *(arrays[x] for x in weights), g=g[row, a:b])
                out[row, a:b] = results[0]
                for x, gradient in zip((*shapes, *weights), results[1:], strict=True):
                    found[x][(row, slice(a, b)) if x in shapes else ...] += gradient
            return out, found

        return {"out": run(np.zeros(shape))[0]}, lambda g: run(g["out"])[1]

    specs = dict.fromkeys(("segment_ids", *shapes), TOKENS) | dict.fromkeys(weights, REPLICATED)
    return Case(
        function.__name__, (function,), call, of_batch, draw, specs, {"out": TOKENS},
        ids=("segment_ids",), has_batch=True,
    )  # fmt: skip


def _shifted(x, g):
    return sequence_oracle.shift(x, 2), sequence_oracle.shift(g, -2)


def _convolved(x, taps, bias, g):
    out = sequence_oracle.causal_conv(x, taps, bias)
    return out, *sequence_oracle.causal_conv_gradients(x, taps, g)


def _summed(x, g):
    return np.cumsum(x, 0), np.cumsum(g[::-1], 0)[::-1]


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
        del arrays["segment_ids"]
        _, placement = place(sizes)
        return {"documents": placement.documents, **by_tokens(placement.apply, arrays)}

    def call(arrays, **where):
        where["documents"] = arrays["documents"]
        of_part = lambda part: part.call({**arrays, "segment_ids": None}, **where)["out"]
        return {name: of_part(part) for name, part in parts.items()}

    def oracle(arrays):
        arrays = dict(arrays)
        (plan,), (batch, num_tokens) = arrays.pop("documents").plans, arrays["x"].shape[:2]
        ranks = plan.kv_metadata.world_size
        ids, placement = place(Sizes(ranks, num_tokens // ranks, batch))
        packed = by_tokens(placement.restore, arrays) | {"segment_ids": ids}
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
    functions, results = (conv.functions + recurrence.functions), dict.fromkeys(parts, TOKENS)
    return Case(
        "placed layers", functions, call, oracle, draw, specs, results, has_batch=True,
        unlike={"nothing": "there is nothing to place"},
    )  # fmt: skip


# ---- Movement.

REPLICAS, FEATURES, CAPACITY = 2, 6, 40


def _draw_plan(rng, sizes, name="metadata"):
    plan = movement_oracle.random_plan(rng, sizes.ranks, 4, sizes.tokens, REPLICAS)
    return {name: cpd.Metadata(**plan)}


def _fields(plan):
    return {name: x for name, x in vars(plan).items() if x is not None}


def _by_ranks(x, plan):
    return x.reshape(plan.world_size, -1, *x.shape[1:])


def _sent(x, plan):
    """What dispatch does to the rows of all ranks, [W * T, ...]; the transpose of `_returned`."""
    rows = movement_oracle.dispatched(_fields(plan), _by_ranks(x, plan), CAPACITY)
    return rows.reshape(-1, *x.shape[1:])


def _returned(y, plan, num_tokens):
    rows = movement_oracle.combined(_fields(plan), _by_ranks(y, plan), num_tokens)
    return rows.reshape(-1, *y.shape[1:])


def movement(functions, call, oracle, names, results) -> Case:
    """`oracle` maps arrays to results and gradients; rows of x are tokens, those of y received."""

    def draw(rng, sizes):
        arrays = _draw_plan(rng, sizes)
        for name in names:
            rows = sizes.ranks * (CAPACITY if name == "y" else sizes.tokens)
            arrays[name] = rng.normal(size=(rows, FEATURES))
        return arrays

    specs = {"metadata": P(AXIS)} | dict.fromkeys(names, ROWS)
    name, results = functions[0].__name__, dict.fromkeys(results, ROWS)
    unlike = {"annotations": "rows are trees of any dtype and shape"}
    return Case(name, functions, call, oracle, draw, specs, results, unlike=unlike)


def _dispatch(arrays, **where):
    return {"there": cpd.dispatch(arrays["x"], arrays["metadata"], capacity=CAPACITY, **where)}


def _dispatch_oracle(arrays):
    x, plan = arrays["x"], arrays["metadata"]
    num_tokens = len(x) // plan.world_size
    return {"there": _sent(x, plan)}, lambda g: {"x": _returned(g["there"], plan, num_tokens)}


def _combine(arrays, **where):
    """The sums are added to the tokens of a rank, which says how many it has."""
    x, plan = arrays["tokens"], arrays["metadata"]
    num_tokens = len(x) // len(plan.seq_len)  # a rank has the plan's row of its own
    return {"back": x + cpd.combine(arrays["y"], plan, num_tokens=num_tokens, **where)}


def _combine_oracle(arrays):
    x, y, plan = (arrays[name] for name in ("tokens", "y", "metadata"))
    back = _returned(y, plan, len(x) // plan.world_size)
    return {"back": x + back}, lambda g: {"tokens": g["back"], "y": _sent(g["back"], plan)}


def _pair(arrays, **where):
    """Queries there and keys back, in one exchange each way."""
    x, plan, size = arrays["q"], arrays["metadata"], CAPACITY
    there = {"q_capacity": size, "kv_capacity": size, **where}
    q, (k,) = cpd.dispatch_qkv(x, (arrays["kv"],), plan, plan, **there)
    num_tokens = len(x) // len(plan.seq_len)
    back = {"q_num_tokens": num_tokens, "kv_num_tokens": num_tokens, **where}
    x, (y,) = cpd.combine_qkv(q, (2 * k,), plan, plan, **back)
    return {"q": q, "x": x, "y": y}


def _pair_oracle(arrays):
    x, k, plan = (arrays[name] for name in ("q", "kv", "metadata"))
    num_tokens = len(x) // plan.world_size
    there_and_back = lambda x: _returned(_sent(x, plan), plan, num_tokens)

    def pull(g):
        of_x = _returned(g["q"], plan, num_tokens) + there_and_back(g["x"])
        return {"q": of_x, "kv": 2 * there_and_back(g["y"])}

    return {"q": _sent(x, plan), "x": there_and_back(x), "y": 2 * there_and_back(k)}, pull


def _two_calls(arrays, **where):
    """Started and done, beside work of the rank."""
    x, plan = arrays["x"], arrays["metadata"]
    exchange, beside = cpd.dispatch_start(x, plan, beside=x, capacity=CAPACITY, **where)
    there, beside = cpd.exchange_done(exchange, beside=2 * beside)
    num_tokens = len(x) // len(plan.seq_len)
    exchange, beside = cpd.combine_start(there, plan, beside=beside, num_tokens=num_tokens, **where)
    x, beside = cpd.exchange_done(exchange, beside=3 * beside)
    return {"x": x, "beside": beside}


def _two_calls_oracle(arrays):
    x, plan = arrays["x"], arrays["metadata"]
    there_and_back = lambda x: _returned(_sent(x, plan), plan, len(x) // plan.world_size)
    pull = lambda g: {"x": there_and_back(g["x"]) + 6 * g["beside"]}
    return {"x": there_and_back(x), "beside": 6 * x}, pull


def ragged_all_to_all() -> Case:
    """A slice to each rank: sizes, where they begin, and where the receiver puts them."""
    names = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"

    def draw(rng, sizes):
        W, N = sizes.ranks, sizes.tokens
        size = rng.integers(0, N // 2 + 1, (W, W))
        begin = rng.integers(0, N - size + 1)
        there = np.cumsum(size, 0) - size  # at each receiver, in the order of senders
        plan = dict(zip(names, (begin, size, there, size.T), strict=True))
        arrays = {name: x.astype(np.int32).reshape(-1) for name, x in plan.items()}
        room = W * (W * (N // 2 + 1))
        shapes = {"operand": (W * N, FEATURES), "output": (room, FEATURES)}
        return arrays | _normal(rng, (), shapes)

    def call(arrays, **where):
        operands = (jnp.asarray(arrays[x]) for x in ("operand", "output"))
        plan = (arrays[x] for x in names)
        return {"out": cpd.ragged_all_to_all(*operands, *plan, **where)}

    def oracle(arrays):
        W = int(len(arrays["send_sizes"]) ** 0.5)
        begin, size, there = (arrays[x].reshape(W, W) for x in names[:3])
        rows, room = (len(arrays[x]) // W for x in ("operand", "output"))
        slices = [
            (slice(r * rows + begin[r, to], r * rows + begin[r, to] + size[r, to]),
             slice(to * room + there[r, to], to * room + there[r, to] + size[r, to]))
            for r in range(W) for to in range(W)
        ]  # fmt: skip
        out = arrays["output"].copy()
        for source, target in slices:
            out[target] = arrays["operand"][source]

        def pull(g):
            of_x, of_into = np.zeros(arrays["operand"].shape), g["out"].copy()
            for source, target in slices:
                of_x[source] += g["out"][target]
                of_into[target] = 0
            return {"operand": of_x, "output": of_into}

        return {"out": out}, pull

    specs = dict.fromkeys(names, P(AXIS)) | dict.fromkeys(("operand", "output"), ROWS)
    function, results = cpd.ragged_all_to_all, {"out": ROWS}
    return Case(
        function.__name__, (function,), call, oracle, draw, specs, results, only_on_ranks=True,
        unlike={"nested": "JAX splits a shard_map that it computes again; XLA rejects it"},
    )  # fmt: skip


# ---- Experts.

CHOICES, EXPERTS, ROOM = 3, 8, 80


def layer_of_experts() -> Case:
    """Rows to their experts, which scale them, and their weighted sums back."""

    def draw(rng, sizes):
        num_tokens = sizes.ranks * sizes.tokens
        index = rng.integers(-1, EXPERTS, (num_tokens, CHOICES)).astype(np.int32)
        of = {"x": (FEATURES,), "weights": (CHOICES,)}
        scale = rng.normal(size=(sizes.ranks * ROOM, 1))
        return {"expert_index": index, "scale": scale, **_normal(rng, (num_tokens,), of)}

    def call(arrays, **where):
        routing = experts.route(arrays["expert_index"], num_experts=EXPERTS, capacity=ROOM, **where)
        rows = experts.dispatch_tokens(arrays["x"], routing)
        out = experts.combine_tokens(rows * arrays["scale"], arrays["weights"], routing)
        return {"rows": rows, "out": out}

    def oracle(arrays):
        x, scale, weights, index = (arrays[n] for n in ("x", "scale", "weights", "expert_index"))
        W = len(scale) // ROOM
        split = lambda a: a.reshape(W, -1, *a.shape[1:])
        held = experts_oracle.evenly(EXPERTS, W)
        places = experts_oracle.rows_of_ranks(split(index), held)
        x, weights, scale = split(x), split(weights), split(scale)
        rows, _ = experts_oracle.grouped_rows(x, split(index), held, ROOM)
        out = experts_oracle.summed_rows(rows * scale, weights, split(index), held)
        flat = lambda a: a.reshape(-1, *a.shape[2:])

        def pull(g):
            g_rows, g_out = split(g["rows"]).copy(), split(g["out"])
            found = {"x": np.zeros(x.shape), "weights": np.zeros(weights.shape)}
            found["scale"] = np.zeros(scale.shape)
            for rank, each in enumerate(places):
                for i, (_, source, token, choice) in enumerate(each):
                    of_y = weights[source, token, choice] * g_out[source, token]
                    y = rows[rank, i] * scale[rank, i]
                    found["weights"][source, token, choice] = (y * g_out[source, token]).sum()
                    found["scale"][rank, i] = (of_y * rows[rank, i]).sum()
                    found["x"][source, token] += g_rows[rank, i] + of_y * scale[rank, i]
            return {name: flat(a) for name, a in found.items()}

        return {"rows": flat(rows), "out": flat(out)}, pull

    specs = {"expert_index": P(AXIS), "scale": P(AXIS), "weights": P(AXIS), "x": ROWS}
    functions = experts.route, experts.dispatch_tokens, experts.combine_tokens
    return Case(
        "experts", functions, call, oracle, draw, specs, {"rows": ROWS, "out": ROWS},
        ids=("expert_index",),
        unlike={"bits": "XLA rounds a product and its sum once, unless it optimizes"},
    )  # fmt: skip


# ---- GEMMs.


def gemm(function, method) -> Case:
    gathers = function is cpd.all_gather_matmul

    def draw(rng, sizes):
        rows, width = sizes.ranks * sizes.tokens, 2 * sizes.ranks
        shapes = ((rows, 5), (5, width)) if gathers else ((rows, width), (width, 5))
        return _normal(rng, (), dict(zip("xw", shapes, strict=True)))

    def call(arrays, **where):
        x, w = jnp.asarray(arrays["x"]), jnp.asarray(arrays["w"])
        return {"out": function(x, w, method=method, **where)}

    def oracle(arrays):
        x, w = arrays["x"], arrays["w"]
        pull = lambda g: {"x": g["out"] @ w.T, "w": x.T @ g["out"]}
        return {"out": x @ w}, pull

    unlike = {"bits": "XLA multiplies whole matrices, and adds in another order"}
    columns, rows = P(None, AXIS), P(AXIS)
    of_x, of_w, of_out = (rows, columns, columns) if gathers else (columns, rows, rows)
    specs, results = {"x": of_x, "w": of_w}, {"out": of_out}
    name = f"{function.__name__} {method}"
    return Case(name, (function,), call, oracle, draw, specs, results, unlike=unlike)


def grouped_gemm() -> Case:
    def draw(rng, sizes):
        num_rows = sizes.ranks * sizes.tokens
        group_sizes = np.array([num_rows // 3, 0, num_rows // 2], np.int32)
        operands = _normal(rng, (), {"lhs": (num_rows, 5), "rhs": (3, 5, 7)})
        return {"group_sizes": group_sizes, **operands}

    def call(arrays):
        operands = (jnp.asarray(arrays[x]) for x in ("lhs", "rhs", "group_sizes"))
        return {"out": cpd.grouped_gemm(*operands)}

    def oracle(arrays):
        x, w, sizes = (arrays[name] for name in ("lhs", "rhs", "group_sizes"))
        ends = np.cumsum(sizes)
        groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        out = np.zeros((len(x), w.shape[2]))
        for rows, matrix in zip(groups, w, strict=True):
            out[rows] = x[rows] @ matrix

        def pull(g):
            of_x = np.zeros(x.shape)
            for rows, matrix in zip(groups, w, strict=True):
                of_x[rows] = g["out"][rows] @ matrix.T
            return {"lhs": of_x, "rhs": np.stack([x[rows].T @ g["out"][rows] for rows in groups])}

        return {"out": out}, pull

    specs = dict.fromkeys(("lhs", "rhs", "group_sizes"), REPLICATED)
    results, functions = {"out": REPLICATED}, (cpd.grouped_gemm,)
    return Case("grouped_gemm", functions, call, oracle, draw, specs, results, is_local=True)


def gemm_and_gelu() -> Case:
    """A product on one device, and its GELU."""
    names = "lhs", "rhs", "bias"

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
    return Case("gemm", (cpd.gemm,), call, oracle, draw, specs, results, is_local=True)


DELTA = {"q": (1, 4), "k": (1, 4), "v": (2, 3), "log_decay": (2,), "beta": (2,)}
LINEAR = {"q": (1, 4), "k": (1, 4), "v": (2, 3), "log_decay": (2, 4)}
CASES = [
    attention(cpd.Balanced(cpd.PlanConfig(block=4)), masks.SlidingWindow(9)),
    placed_attention(),
    attention("ring"),
    attention("zigzag", "full"),
    attention("halo", masks.SlidingWindow(4)),
    attention("hamilton", masks.BlockCausal(3)),
    attention("ulysses", masks.Chunked(5)),
    selected_attention(),
    latent_attention(),
    local_attention(),
    layer(sequence.shift, {"x": (3,)}, _shifted, 2),
    layer(sequence.causal_conv, {"x": (3,)}, _convolved, weights={"weight": (4, 3), "bias": (3,)}),
    layer(sequence.recurrence, {"x": (3,)}, _summed, RunningSum()),
    layer(sequence.gated_delta_rule, DELTA, partial(sequence_oracle.recurrence, scale=0.5),
          like="v"),
    layer(sequence.linear_attention, LINEAR, partial(sequence_oracle.recurrence, scale=1.0),
          like="v"),
    layer(sequence.linear_recurrence, {"x": (3,), "log_decay": (3,)},
          sequence_oracle.linear_recurrence),
    placed_layers(),
    movement((cpd.dispatch,), _dispatch, _dispatch_oracle, ("x",), ("there",)),
    movement((cpd.combine,), _combine, _combine_oracle, ("tokens", "y"), ("back",)),
    movement((cpd.dispatch_qkv, cpd.combine_qkv), _pair, _pair_oracle, ("q", "kv"), "qxy"),
    movement((cpd.dispatch_start, cpd.combine_start), _two_calls, _two_calls_oracle, ("x",),
             ("x", "beside")),
    ragged_all_to_all(),
    layer_of_experts(),
    *(gemm(cpd.all_gather_matmul, method) for method in ("none", "ring")),
    *(gemm(cpd.matmul_reduce_scatter, method) for method in ("none", "ring", "pipeline")),
    grouped_gemm(),
    gemm_and_gelu(),
]  # fmt: skip
