"""The plan command: numbers that agree with their sources."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from plan_inputs import ROWS, ids_of, mask_arrays, run, write_inputs

from jax_cp_dispatch import (
    PlanConfig,
    choose_algorithm,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.masks import BlockCausal, Blocks, PrefixLM, Ranges, SharedPrefix, Tree

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


def mean_bytes(layout):
    """Bytes that a rank sends on average, inside nodes and between them."""
    return [layout[f"forward_bytes_{x}_nodes_mean_rank"] for x in ("inside", "between")]


def test_comparison_as_tables_json_and_pictures(folder, capsys):
    arguments = ["rows.json", "--ranks", "2,4", "--nodes", "2", "--tokens-per-rank", "256"]
    assert run(*arguments, "--json") == 0
    said = capsys.readouterr()
    assert "[6/6] 4 ranks: predicting times" in said.err
    points = json.loads(said.out)["points"]
    assert [point["ranks"] for point in points] == [2, 4]
    # 512 columns: 512 of 700; 10 of 18 whole, one in part
    assert (points[0]["documents_cut"], points[0]["documents_left_out"]) == (2, 1 + 7)
    assert (points[1]["documents_cut"], points[1]["documents_left_out"]) == (0, 0)
    assert points[1]["tokens_per_rank"] == 2 * points[1]["tokens_per_rank_and_row"] == 512

    rows = ROWS
    config = PlanConfig(ranks_per_node=2)
    plan = place_tokens(rows, world_size=4, columns=1024, config=config).plan
    layouts = {layout["name"]: layout for layout in points[1]["layouts"]}
    placed, ring = layouts["placed"], layouts["contiguous, ring"]
    config = PlanConfig(ranks_per_node=2)  # for 32 heads, 8 of keys
    moved = plan_attention(lengths=rows, world_size=4, columns=1024, config=config)
    assert layouts["balanced"]["queries_moved_all_ranks"] == moved.num_q_tokens_moved
    assert layouts["balanced"]["keys_moved_all_ranks"] == moved.num_kv_tokens_moved
    q_bytes = 2 * 32 * 128 * 2  # and the output that returns
    assert 4 * sum(mean_bytes(layouts["balanced"])) == (
        moved.num_q_tokens_moved * q_bytes + moved.num_kv_tokens_moved * q_bytes // 4
    )
    assert placed["keys_moved_all_ranks"] == plan.num_kv_tokens_moved
    assert placed["work_max_over_mean"] == pytest.approx(plan.imbalance)
    assert placed["slowest_rank"] == plan.pairs.argmax()
    row_bytes = 2 * 8 * 128 * 2
    received = np.array(plan.kv_metadata.num_recv_tokens, np.int64)[:, :4]
    between = received.copy()
    between[:2, :2] = between[2:, 2:] = 0
    assert 4 * mean_bytes(placed)[1] == between.sum() * row_bytes
    assert 4 * sum(mean_bytes(placed)) == plan.num_kv_tokens_moved * row_bytes
    most = max(between.sum(0).max(), between.sum(1).max()) * row_bytes
    assert placed["forward_bytes_between_nodes_busiest_rank"] == most

    # Contiguous work, counted query by query.
    pairs = np.zeros(4)
    for row in ROWS:
        position = np.concatenate([np.arange(1, length + 1) for length in row])
        np.add.at(pairs, np.arange(len(position)) // 256, position)
    assert ring["work_max_over_mean"] == pytest.approx(pairs.max() / pairs.mean())
    assert ring["slowest_rank"] == pairs.argmax() == 2
    assert ring["keys_moved_all_ranks"] == 4 * 3 * 512
    # Each rank sends 3 times; half of the ranks to the other node.
    assert mean_bytes(ring) == [3 * 512 * row_bytes / 2] * 2
    assert ring["forward_bytes_between_nodes_busiest_rank"] == 3 * 512 * row_bytes

    slowest = points[1]["slowest_before_planning"]
    in_document = sum(range(513, 701))  # keys of its queries on rank 2
    assert slowest == {
        "rank": 2,
        "work_over_mean": pytest.approx(pairs[2] / pairs.mean()),
        "document": "rows.json list 0 item 0",
        "document_share_of_work": pytest.approx(in_document / pairs[2]),
        "document_tokens": 700,
        "document_tokens_on_rank": 188,
    }

    assert run(*arguments, "--describe", "--pictures", "pictures") == 0
    text = capsys.readouterr().out
    chosen = points[1]["choice"]
    assert re.search(rf"^  \* {chosen} ", text, re.M)
    assert re.search(
        r"slowest +rank 2 before planning: [\d.]+ times the mean .* 188 tokens of\n", text
    )
    assert "  rows.json list 0 item 0 (700 tokens)\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert points[1]["reason"].split(",")[0] in text.replace("\n  ", " ")
    assert "All numbers of ranks" in text and "Placement: 4 ranks of 512 tokens" in text
    names = [f"{kind}_{n}.png" for kind in ("balanced", "placed", "timeline") for n in (2, 4)]
    assert sorted(path.name for path in (folder / "pictures").iterdir()) == sorted(names)


def test_the_command_chooses_as_choose_algorithm(folder, capsys):
    """One truth: the same plans, the same traffic of the busiest ranks, the same reason."""
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    sizes |= {"num_ranks": 16, "tokens_per_rank": 64, "can_place": True}
    for name in ("h100", "cpu"):
        arguments = ["rows.json", "--ranks", "16", "--tokens-per-rank", "64", "--hardware", name]
        assert run(*arguments, "--json") == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        choice = choose_algorithm(ROWS, hardware=HARDWARE[name], **sizes)
        assert point["reason"] == choice.reason
        assert point["algorithm"] == repr(choice.algorithm)
        shared = "All ranks share 2 cores: a step takes as long as the work of all of them"
        assert (shared in choice.reason) == (name == "cpu")
        seconds = {name: x["seconds"] for name, x in point["predictions"].items()}
        waits = {name: x["rearrangement_seconds"] for name, x in point["predictions"].items()}
        for algorithm, prediction in choice.predictions.items():
            assert seconds[algorithm] - waits[algorithm] == pytest.approx(prediction.total)


@pytest.mark.parametrize("row, tokens", [(0, 128), (1, 104)])
def test_masks_of_arrays(folder, capsys, row, tokens):
    """Arrays are cut, or padded, to the columns of the ranks, as the documents are."""
    ids = ids_of(ROWS)[row : row + 1]
    mask_of = {
        "prefix_lm": lambda x: PrefixLM(x["in_prefix"]),
        "blocks": lambda x: Blocks(x["block_ids"]),
        "shared_prefix": lambda x: SharedPrefix(x["completion_ids"]),
        "tree": lambda x: Tree(x["span_ids"], x["parents"]),
        "ranges": lambda x: Ranges(x["k_start"], x["k_end"]),
        "full": lambda x: "full",
        "block_causal:16": lambda x: BlockCausal(16),
    }
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    sizes |= {"num_ranks": 8, "tokens_per_rank": tokens, "can_place": True}
    columns = 8 * tokens
    ids = np.pad(ids, ((0, 0), (0, max(0, columns - ids.shape[1]))))[:, :columns]
    kept = [np.unique_counts(x[x > 0]).counts.tolist() for x in ids]
    given = mask_arrays(ids_of(ROWS)[row : row + 1])
    for name, x in given.items():
        if name != "parents":
            more = ((0, 0), (0, max(0, columns - x.shape[1])))
            given[name] = np.pad(x, more, constant_values=-(name == "span_ids"))[:, :columns]
    for name, make in mask_of.items():
        arguments = ["masks.npz", "--mask", name, "--row", row, "--ranks", 8]
        assert run(*arguments, "--tokens-per-rank", tokens, "--json") == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        choice = choose_algorithm(kept, mask=make(given), hardware=HARDWARE["h100"], **sizes)
        assert point["reason"] == choice.reason, name


def keys_of(value, path=""):
    """Yields the path of every key; the names of algorithms are `NAME`."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            below = "NAME" if path.endswith("predictions") else key
            inner = f"{path}.{below}" if path else below
            if not isinstance(item, dict | list):
                yield inner
            yield from keys_of(item, inner)


def test_the_documentation_lists_all_keys(folder, capsys):
    assert run("rows.json", "--ranks", "16", "--json") == 0
    found = set(keys_of(json.loads(capsys.readouterr().out)))
    page = (ROOT / "docs/plan_command.md").read_text()
    described = re.findall(r"^\| `([a-z][\w.\[\]]+)` \|", page, re.M)
    assert len(described) == len(set(described))
    assert found == set(described)
