"""The code of every page runs, with its assertions, and its results and printed texts are right.

The suite leaves pages that take long to `.ci/run`; their parts have tests of their own.
"""

import contextlib
import pathlib
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mask_oracle
import numpy as np
import pytest
import selected_oracle
from attention_oracle import masked_attention
from in_ci import in_ci
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import mesh_of
from packed_batches import pack

import jax_cp_dispatch as cpd

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)
FRAGMENTS = {  # pages whose blocks are parts of a program that the text around them completes
    *("dispatch.md", "errors.md", "gpu.md", "processes.md", "several_hosts.md"),
    "maxtext.md",  # tests/maxtext runs its programs
}


def text_of(page) -> str:
    return (ROOT if page == "README.md" else ROOT / "docs").joinpath(page).read_text()


def run_page(page, capsys) -> dict[str, Any]:
    """Runs the code blocks in order; returns their names. They print what the page shows."""
    names: dict = {}
    for code, shown in BLOCK.findall(text_of(page)):
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not shown or printed == shown
    return names


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def dense(qkv, segment_ids, mask: Any = "causal"):
    q, k, v = qkv
    return masked_attention(q, k, v, mask_oracle.batch_pairs(mask, segment_ids))[0]


# ---- What is checked of a page besides its own assertions.


def readme(names):
    for x in "qkv":
        assert names[f"d{x}"].shape == names[x].shape


def choose_an_algorithm(names):
    stored = names["stored"]
    qkv, out = stored.restore([names[x] for x in "qkv"]), stored.restore(names["profile"].out)
    close(out, dense(qkv, stored.restore(stored.segment_ids)))
    assert pathlib.Path("trace.json").is_file()


def comm_gemm(names):
    x, up, down = names["x"], names["up"], names["down"]
    for name in ("y", "y_of_global_arrays", "y_with_buffer"):
        close(names[name], jax.nn.gelu(x @ up) @ down, 1e-4)
    for name, weight in zip("qkv", names["arrays"], strict=True):
        close(names[name], np.einsum("btd,dnh->btnh", x, weight), 1e-4)
    close(names["product"], up @ down)
    np.testing.assert_array_equal(names["gathered"], x[0])
    assert names["profile"].bound <= names["profile"].total
    assert {path.name for path in pathlib.Path.cwd().iterdir()} >= {"overlap.json", "overlap.svg"}
    assert not cpd.buffers.list_comm_overlap_buffers()


def latents(names):
    """The attention of expanded keys and values."""
    k, v = names["expand"](names["weights"], (names["latent"][0], names["rope"][0]))
    ids = np.repeat([[1, 2]], [40, 24], axis=1)
    close(names["out"], dense((names["q"], k[None], v[None]), ids), 3e-6)


def limits(names):
    """The recipes for attention, of float32 sums of 32 keys."""
    qkv, ids = [names[x] for x in "qkv"], np.ones((1, 32), int)
    close(names["streaming_out"], dense(qkv, ids, cpd.masks.SlidingWindow(8, first=4)))
    q, k, v = qkv
    out, lse = masked_attention(q, k, v, mask_oracle.batch_pairs("causal", ids))
    share = 1 / (1 + np.exp(names["sink"] - lse.transpose(0, 2, 1)))[..., None]
    close(names["sink_out"], share * out)
    close(names["new"], out[:, 19:20])
    i, zero = names["i"], names["zero"]
    attend = lambda sink: cpd.local_attention(q, k, v, zero, i + 1, sink=sink)[0].sum()
    of_sink = -(share * (1 - share) * out).sum((0, 1, 3))
    np.testing.assert_allclose(
        jax.jit(jax.grad(attend))(names["sink"]), of_sink, rtol=1e-3, atol=1e-4
    )


def masks(names):
    ids, of = names["ids"], names["of"]
    spans = of((0, 3), (1, 2), (2, 2), (3, 3), (4, 3), (5, 3))
    in_row = {
        "PrefixLM": mask_oracle.prefix_pairs(of((True, 4), (False, 6), (True, 2), (False, 4))),
        "Blocks": mask_oracle.block_pairs(of((0, 2), (1, 4), (0, 4), (2, 3), (0, 3))),
        "SharedPrefix": mask_oracle.shared_prefix_pairs(names["turns"]),
        "Tree": mask_oracle.tree_pairs(spans, np.array([[-1, 0, 1, 0, -1, 4]])),
        "BlockDiffusion": mask_oracle.block_diffusion_pairs(ids, 2),
    }
    for name, out in names["outs"].items():
        mask = names["examples"][name]
        if mask.has_arrays:
            pairs = mask_oracle.batch_visible(ids, in_row[name])
        else:
            pairs = mask_oracle.batch_pairs(mask, ids)
        close(out, masked_attention(names["q"], names["k"], names["v"], pairs)[0], 2e-6)
    close(names["of_layers"][0], names["outs"]["Tree"], 2e-6)
    placement, copies = names["placement"], names["copies"]
    of_copies = mask_oracle.block_diffusion_pairs(copies.segment_ids, 2)
    q, k, v = (placement.restore(names[f"{x}2"]) for x in "qkv")
    close(placement.restore(names["diffusion"]), masked_attention(q, k, v, of_copies)[0], 2e-6)
    labels = np.take_along_axis(names["tokens"], copies.columns, axis=1)
    np.testing.assert_array_equal(placement.restore(names["labels"]), labels)


def selected_attention(names):
    """Picks as by all scores of each query; the same attention of packed and placed tokens."""
    back, ids = lambda x: names["placement"].restore(np.asarray(x)), names["ids"]
    q_index, k_index, w = (back(names[x])[:, :, None] for x in ("q_index", "k_index", "w"))
    options = {"num_keys": 16, "block": 1, "pool": "max", "local": False}
    picks = selected_oracle.select(q_index, k_index, w, ids, "causal", **options)
    np.testing.assert_array_equal(names["recorded"], picks[:, :, 0])
    q, k = map(back, (names["q"], names["latents"]))
    seen = selected_oracle.pairs(picks, ids, "causal", 1)
    out, *_ = selected_oracle.attention((q, k, k[..., :16]), seen)
    close(names["replayed"], out)
    options = {"num_keys": 4, "block": 8, "pool": "max", "local": True}
    of_blocks = selected_oracle.select(q_index, k_index, w, ids, "causal", **options)
    np.testing.assert_array_equal(names["of_blocks"], of_blocks[:, :, 0])
    assert (back(names["loss"]) >= 0).all()


def metadata(names, page="metadata.md", num_cells=48):
    """The tables with a column for each rank have the values that the code computes."""
    compared, owner, is_of_ranks, line_before = 0, None, False, ""
    for line in text_of(page).splitlines():
        if line.startswith("|") and not line_before.startswith("|"):
            is_of_ranks = "| rank 0 |" in line
        line_before = line
        if not line.startswith("|") or line.startswith("|---") or not is_of_ranks:
            continue
        head, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = re.fullmatch(r"`(\w+)`", head)
        if cells[0] == "rank 0":  # if the rows are fields, the header names their object
            owner = name and names[name[1]]
            continue
        assert name, line
        value = names[name[1]] if owner is None else getattr(owner, name[1])
        assert len(cells) == len(value)
        for rank, cell in enumerate(cells):
            wanted = [sum(map(int, number.split("+"))) for number in cell.split()]
            np.testing.assert_array_equal(np.ravel(value[rank]), wanted, err_msg=line)
            compared += 1
    assert compared == num_cells


def rollouts(names):
    """The loss of packed trees is that of each rollout alone, in NumPy; a table shows a row."""
    params = {name: np.float64(x) for name, x in names["params"].items()}
    paths = [path for tree in names["trees"] for path in paths_of(tree)]
    assert len(paths) == 4
    want, near = (sum(loss_of(path, params, window) for path in paths) for window in (None, 3))
    np.testing.assert_allclose(names["value"], want, rtol=1e-5)
    np.testing.assert_allclose(names["near_value"], near, rtol=1e-5)
    assert abs(near - want) > 1e-3 * abs(want)
    stored = (names["batch"]["segment_ids"] != 0).sum()
    assert stored < sum(len(path) - 1 for path in paths)  # shared tokens are stored once

    leaf = lambda tokens, weight: (tokens, [weight] * len(tokens), [0.0] * len(tokens), ())
    prompt = names["untrained"]([*"abc"], leaf([*"de"], 0.5), leaf([*"fg"], -0.5))
    row, parents = names["pack"]([prompt], columns=6)
    pattern = r"^\| (token|label|position|span).*?\|(.*)\|$"
    rows = re.findall(pattern, text_of("rollouts.md"), flags=re.M)
    table = {name: [x.strip(" *") for x in cells.split("|")] for name, cells in rows}
    assert [*row["tokens"][0]] == table["token"] and [*row["labels"][0]] == table["label"]
    assert [str(x) for x in row["positions"][0]] == table["position"]
    assert [f"{x}, {parents[0][x]}" for x in row["span_ids"][0]] == table["span"]
    assert row["weights"][0].tolist() == [0, 0, 0.5, 0.5, -0.5, -0.5]


def paths_of(node, before=()):
    """Every path from the root to a leaf: tokens, and for each its weight and old log-p."""
    tokens, weights, old, children = node
    path = [*before, *zip(tokens, weights, old, strict=True)]
    if not children:
        yield path
    for child in children:
        # What several rollouts share counts in the first of them.
        yield from paths_of(child, path)
        path = [(token, 0.0, old) for token, _, old in path]


def loss_of(path, params, window=None):
    """The clipped loss of one rollout by causal attention, in a window."""
    tokens, weights, old = (np.array(x) for x in zip(*path, strict=True))
    x = params["embedding"][tokens[:-1]] + params["position"][: len(tokens) - 1]
    qkv = (np.einsum("td,dnh->tnh", x, params[name])[None] for name in "qkv")
    mask = cpd.masks.SlidingWindow(window) if window else "causal"
    out = dense(qkv, np.ones((1, len(x)), int), mask)
    logits = (x + out.reshape(x.shape)) @ params["embedding"].T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ratio = np.exp(log_p[np.arange(len(x)), tokens[1:]] - old[1:])
    return -np.minimum(ratio * weights[1:], np.clip(ratio, 0.8, 1.2) * weights[1:]).sum()


PAGES = {
    "README.md": readme,
    "choose_an_algorithm.md": choose_an_algorithm,
    "comm_gemm.md": comm_gemm,
    "documents.md": None,
    "experts.md": None,
    "latents.md": latents,
    "limits.md": limits,
    "masks.md": masks,
    "metadata.md": metadata,
    "movement.md": partial(metadata, page="movement.md", num_cells=12),
    "placement.md": None,
    "plans.md": None,
    "rollouts.md": rollouts,
    "scaling.md": None,
    "selected_attention.md": selected_attention,
    "sequence.md": None,
    "windows.md": None,
}


LONG = "masks.md", "scaling.md", "sequence.md"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=in_ci) if page in LONG else page for page in PAGES]
)
def test_page(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Leaving the context also undoes `jax.set_mesh` of the page.
    with jax.set_mesh(mesh_of(8)) if page == "README.md" else contextlib.nullcontext():
        names = run_page(page, capsys)
    check = PAGES[page]
    if check is not None:
        check(names)


def test_every_page_with_code_is_run():
    docs = ["README.md", *(path.name for path in (ROOT / "docs").glob("*.md"))]
    with_code = {page for page in docs if BLOCK.search(text_of(page))}
    assert with_code == {*PAGES, *FRAGMENTS, "mesh_axes.md", "trainers.md"}


@in_ci
def test_mesh_axes():
    """Blocks that begin with the arrays that the text describes."""
    blocks = [code for code, _ in BLOCK.findall(text_of("mesh_axes.md"))]
    on_axes, plans, processes, two_axes, two_levels, stages = blocks
    rng = np.random.default_rng(0)
    segment_ids, _ = pack(rng, 2, 32, max_length=20)
    qkv = [rng.normal(size=(2, 32, n, 8)).astype(np.float32) for n in (4, 2, 2)]
    arrays = {**dict(zip("qkv", qkv, strict=True)), "segment_ids": segment_ids}
    names: dict[str, Any] = dict(jax=jax, np=np, cpd=cpd, partial=partial, P=P)
    names |= dict(AxisType=AxisType, NamedSharding=NamedSharding, **arrays)
    want = dense(qkv, segment_ids)

    exec(on_axes, names)
    close(names["attend"](*qkv, segment_ids), want)
    exec(plans, names)
    close(names["out"], want)
    exec(processes, names)
    assert all(x.sharding.spec == P("data") for x in jax.tree.leaves(names["documents"]))

    lengths = [[20, 7, 5], [32]]
    ids = np.stack([np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths])
    names |= dict(lengths=lengths, segment_ids=ids)
    exec(two_axes, names)
    close(names["placement"].restore(np.asarray(names["out"])), dense(qkv, ids))

    names |= arrays
    exec(two_levels, names)
    close(names["out"], want)

    three, four = '(2, 2, 2), ("data",', '(2, 1, 2, 2), ("stage", "data",'
    assert three in on_axes
    exec(on_axes.replace(three, four).replace("* 3", "* 4"), names)
    exec(stages, names)
    of_stages = [np.stack([x, rng.permutation(x, axis=3)]) for x in qkv]
    out = names["attend_stages"](*of_stages, np.stack([segment_ids] * 2))
    for stage, of_stage in enumerate(zip(*of_stages, strict=True)):
        close(out[stage], dense(of_stage, segment_ids))


@in_ci
def test_trainers():
    """Every loss of the page is that of dense attention."""
    for library in ("equinox", "flax", "optax"):
        pytest.importorskip(library, reason="install the test extra")
    names: dict = {}
    values, blocks = [], BLOCK.findall(text_of("trainers.md"))
    for code, _ in blocks:
        exec(code, names)
        values += [names.pop("value")] if "value" in names else []
    assert (len(blocks), len(values)) == (16, 8)
    assert 1 <= names["after"] <= names["before"][0]
    ring, placed = names["profiles"]
    assert sum(ring.work) == sum(placed.work) and names["speed_up"] > 0
    assert placed.work_imbalance <= ring.work_imbalance
    batch = jax.tree.map(np.asarray, names["batch"])
    mask = mask_oracle.batch_pairs("causal", batch["documents"].segment_ids)[:, None]
    attend = partial(jax.nn.dot_product_attention, mask=mask)
    want = names["loss"](names["params"], batch, attend)
    np.testing.assert_allclose(values, want, rtol=1e-6)
    np.testing.assert_allclose(names["bfloat16_value"], want, rtol=1e-2)
    check_fsdp(names)
    for y in (names["y"], names["z"]):
        assert y.shape == names["x"].shape and jnp.isfinite(y).all()


def check_fsdp(names):
    """Gathers are as many as the page says, none of tokens; masters keep dtype and shards."""
    gathered = names["gathered"]
    assert f"`gathered` has {len(gathered)} shapes" in text_of("trainers.md")
    rows = len(names["batch"]["tokens"])  # of tokens [B, T, ...]; no weight begins with so few
    of_tokens = re.compile(rf"\(?\w+\[({rows}|{rows // names['NUM_GROUPS']}),")
    assert not any(of_tokens.match(shape) for shape in gathered), gathered
    masters = zip(*map(jax.tree.leaves, (names["masters"], names["shardings"])), strict=True)
    for w, sharding in masters:
        assert w.dtype == jnp.float32 and w.sharding.is_equivalent_to(sharding, w.ndim)
    for x in jax.tree.leaves(names["training"]):
        assert x.sharding.device_set == {*names["mesh"].devices.flat}
