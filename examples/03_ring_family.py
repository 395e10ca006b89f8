"""Hamilton attention on packed documents: choose an algorithm, store tokens in zigzag order.

Uses eight virtual CPU devices. The data pipeline stores tokens in zigzag order, and their
`Documents` say so; the devices need not reorder them. It runs inside `shard_map`, forward and
backward, and is compared with dense attention in the usual order.
"""

import json
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.documents import document_lengths

start_cpu_devices(8)  # virtual ones, before JAX starts

W, T, N, K, H, VOCABULARY, AXIS = 8, 512, 4, 2, 16, 97, "cp"
LENGTHS = (200, 31, 150, 100)  # of the documents; the rest is padding
MESH = jax.make_mesh((W,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def pack() -> tuple[dict[str, np.ndarray], cpd.Documents]:
    """Returns arrays [1, T] of consecutive documents; a label is the next token of its document."""
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(1, T))
    segment_ids = np.zeros((1, T), np.int32)
    segment_ids[0, : sum(LENGTHS)] = np.repeat(np.arange(1, 1 + len(LENGTHS)), LENGTHS)
    documents = cpd.Documents(segment_ids)  # which counts the positions
    labels = cpd.sequence.shift_documents(tokens, -1, documents=documents, fill=-1)
    return {"tokens": tokens, "labels": labels}, documents


def rope(x, positions):
    """Rotary embedding; a token's position does not depend on where it is stored."""
    angle = positions[..., None, None] * 1e4 ** -jnp.linspace(0, 1, H // 2, endpoint=False)
    turned = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def project(parameters, batch, documents):
    x = parameters["embedding"][batch["tokens"]]
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, parameters[name]) for name in "qkv")
    return rope(q, documents.positions), rope(k, documents.positions), v


def loss(parameters, batch, documents, attend):
    """Returns the mean over the labels, which does not depend on the order of the tokens."""
    out = attend(*project(parameters, batch, documents), documents)
    logits = out.reshape(1, T, N * H) @ parameters["out"]
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
    return -jnp.mean(scores[..., 0], where=batch["labels"] >= 0)


def hamilton(q, k, v, documents):
    def local(q, k, v, documents):  # this rank's rows
        options: Any = {"algorithm": "hamilton", "axis_name": AXIS, "documents": documents}
        return cpd.context_parallel_attention(q, k, v, **options)

    rows = P(None, AXIS)
    specs = rows, rows, rows, documents.specs(AXIS)
    return jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=rows)(q, k, v, documents)


def dense(q, k, v, documents):
    segment_ids = documents.segment_ids
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, :, None] > 0)
    mask = (same & jnp.tril(jnp.ones((T, T), bool)))[:, None]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e30)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def main() -> None:
    batch, documents = pack()
    lengths = document_lengths(documents.segment_ids)
    sizes: Any = dict(tokens_per_rank=T // W, num_heads=N, num_kv_heads=K, head_size=H, itemsize=4)
    for layout in ("contiguous", "zigzag"):
        choice = cpd.choose_algorithm(
            lengths, num_ranks=W, layout=layout, hardware=HARDWARE["mi300x"], **sizes
        )
        print(f"8 MI300X, {layout}: {choice.reason}")

    zigzag = documents.zigzag(W)
    stored = zigzag.apply(batch)

    random = np.random.default_rng(1)
    shapes = {"q": (32, N, H), "k": (32, K, H), "v": (32, K, H)}
    shapes |= {"embedding": (VOCABULARY, 32), "out": (N * H, VOCABULARY)}
    parameters = {x: 0.3 * random.normal(size=s).astype("f") for x, s in shapes.items()}
    step = jax.jit(jax.value_and_grad(loss), static_argnums=3)
    value, gradients = step(parameters, stored, zigzag, hamilton)
    same_value, expected = step(parameters, batch, documents, dense)
    np.testing.assert_allclose(value, same_value, rtol=1e-5)
    for name in gradients:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-5, atol=1e-6)
    print(f"loss {float(value):.4f} and the gradients of {', '.join(gradients)}: verified")

    qkv = jax.jit(project)(parameters, stored, zigzag)
    options: Any = {"mesh": MESH, "axis_name": AXIS, "documents": zigzag}
    profile = cpd.profiling.hamilton_attention_profile(*qkv, **options)
    print(profile)
    in_order = zigzag.restore(profile.out)
    expected = jax.jit(dense)(*jax.jit(project)(parameters, batch, documents), documents)
    np.testing.assert_allclose(in_order, expected, rtol=1e-5, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        path = profile.write_chrome_trace(f"{folder}/trace.json")
        spans = [x for x in json.loads(path.read_text())["traceEvents"] if x["ph"] == "X"]
    assert len(spans) == W * (2 * W - 1)  # W computations and W - 1 exchanges on each rank
    print(f"a trace with {len(spans)} spans for ui.perfetto.dev: verified")


if __name__ == "__main__":
    main()
