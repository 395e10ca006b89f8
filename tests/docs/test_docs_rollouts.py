"""docs/rollouts.md: the loss of packed trees is that of each rollout alone, in NumPy."""

import pathlib
import re

import numpy as np

PAGE = (pathlib.Path(__file__).parents[2] / "docs/rollouts.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def rollouts(node, before=()):
    """Every path from the root to a leaf: tokens, and for each its weight and old log-p."""
    tokens, weights, old, children = node
    path = [*before, *zip(tokens, weights, old, strict=True)]
    if not children:
        yield path
    for child in children:
        # What several rollouts share counts in the first of them.
        yield from rollouts(child, path)
        path = [(token, 0.0, old) for token, _, old in path]


def loss_of(path, params, window=None):
    """The clipped loss of one rollout by causal attention, in a window."""
    tokens, weights, old = (np.array(x) for x in zip(*path, strict=True))
    x = params["embedding"][tokens[:-1]] + params["position"][: len(tokens) - 1]
    q, k, v = (np.einsum("td,dnh->tnh", x, params[name]) for name in "qkv")
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    distance = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
    sees = (distance >= 0) & (distance < (window or len(x)))
    scores = np.exp(np.where(sees, scores, -np.inf))
    out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    logits = (x + out.reshape(x.shape)) @ params["embedding"].T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ratio = np.exp(log_p[np.arange(len(x)), tokens[1:]] - old[1:])
    return -np.minimum(ratio * weights[1:], np.clip(ratio, 0.8, 1.2) * weights[1:]).sum()


def test_the_loss_is_that_of_separate_rollouts():
    names: dict = {}
    for code in CODE:
        exec(code, names)
    params = {name: np.float64(x) for name, x in names["params"].items()}
    paths = [path for tree in names["trees"] for path in rollouts(tree)]
    assert len(paths) == 4
    want = sum(loss_of(path, params) for path in paths)
    np.testing.assert_allclose(names["value"], want, rtol=1e-5)
    near = sum(loss_of(path, params, window=3) for path in paths)
    np.testing.assert_allclose(names["near_value"], near, rtol=1e-5)
    assert abs(near - want) > 1e-3 * abs(want)
    stored = (names["batch"]["segment_ids"] != 0).sum()
    assert stored < sum(len(path) - 1 for path in paths)  # shared tokens are stored once


def test_the_table_of_the_page():
    names: dict = {}
    code = CODE[0]
    exec(code[: code.index("up, down =")], names)
    leaf = lambda tokens, weight: (tokens, [weight] * len(tokens), [0.0] * len(tokens), ())
    prompt = names["untrained"]([*"abc"], leaf([*"de"], 0.5), leaf([*"fg"], -0.5))
    row, parents = names["pack"]([prompt], columns=6)
    rows = re.findall(r"^\| (token|label|position|span).*?\|(.*)\|$", PAGE, flags=re.M)
    table = {name: [x.strip(" *") for x in cells.split("|")] for name, cells in rows}
    assert [*row["tokens"][0]] == table["token"] and [*row["labels"][0]] == table["label"]
    assert [str(x) for x in row["positions"][0]] == table["position"]
    assert [f"{x}, {parents[0][x]}" for x in row["span_ids"][0]] == table["span"]
    assert row["weights"][0].tolist() == [0, 0, 0.5, 0.5, -0.5, -0.5]
