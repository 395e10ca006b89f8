"""Code of the pages runs, with its assertions, and prints what they show; numbers are right."""

import pathlib
import re

import jax
import numpy as np
import pytest
from attention_oracle import masked_attention
from doc_pages import DOCS, run_page

import jax_cp_dispatch as cpd

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page",
    ["documents.md", "experts.md", "placement.md", "plans.md", "scaling.md", "sequence.md"],
)
def test_page(page, capsys):
    assert jax.device_count() == 8
    run_page(page, capsys)


def test_latents(capsys):
    """The attention of expanded keys and values."""
    names = run_page("latents.md", capsys)
    rows = names["latent"][0], names["rope"][0]
    k, v = (np.asarray(x)[None] for x in names["expand"](names["weights"], rows))
    document = np.repeat([1, 2], [40, 24])
    allowed = (document[:, None] == document) & np.tri(64, dtype=bool)
    want, _ = masked_attention(names["q"], k, v, allowed[None])
    np.testing.assert_allclose(names["out"], want, rtol=0, atol=3e-6)


def test_choose_an_algorithm(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("choose_an_algorithm.md", capsys)
    # Other cycles give the same attention.
    out = cpd.context_parallel_attention(
        *(names[x] for x in "qkv"), algorithm="hamilton", **names["options"]
    )
    np.testing.assert_allclose(names["profile"].out, out, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "trace.json").is_file()


CELL = re.compile(r"`(\w+)`")


@pytest.mark.parametrize("page, num_cells", [("metadata.md", 48), ("movement.md", 12)])
def test_tables_of_ranks_are_computed_values(page, num_cells, capsys):
    names = run_page(page, capsys)
    compared = 0
    owner, is_of_ranks, line_before = None, False, ""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("|") and not line_before.startswith("|"):
            is_of_ranks = "| rank 0 |" in line
        line_before = line
        if not line.startswith("|") or line.startswith("|---") or not is_of_ranks:
            continue
        head, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = CELL.fullmatch(head)
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


def test_versions_and_sizes_match_the_sources():
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (jax_version,) = re.findall(r'"jax>=([\d.]+)"', project)
    assert f"Python {python} to" in readme and f"jax {jax_version} or newer" in readme
    header = "".join(path.read_text() for path in (ROOT / "csrc" / "kernels").glob("*.h"))
    size = lambda name: re.findall(rf"\b{name} = (\d+)", header)[0]
    ranks, plans, arrays = map(size, ("kMaxRanks", "kMaxOperandGroups", "kMaxArrays"))
    limit = f"One call supports up to {ranks} ranks, {plans} plans and {arrays} arrays."
    assert limit in (DOCS / "gpu.md").read_text()
