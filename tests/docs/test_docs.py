"""The README's example runs, and links resolve."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_first_example_of_the_readme(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    checks = "\nassert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape\n"
    program = tmp_path / "first.py"
    program.write_text(code + checks)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr


def anchors(page):
    """Returns the anchors by which GitHub links to a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            if not target.startswith("http"):
                to = page.parent / target if target else page
                assert to.exists(), (page, target)
                assert not anchor or anchor in anchors(to), (page, target, anchor)


def test_paths_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = r"(?:benchmarks|csrc|docs|examples|jax_cp_dispatch|tests)"
    paths = set(re.findall(rf"(?:^|[\s`])({folders}(?:/[\w.]+)*)(?=[\s`,])", text, flags=re.M))
    assert {"csrc", "tests/native/fuzz.sh", "benchmarks/results"} <= paths
    absent = [path for path in paths if not (ROOT / path).exists()]
    assert not absent


def test_readme_reaches_its_results_within_700_words():
    before, _ = (ROOT / "README.md").read_text().split("\n<!-- benchmarks:begin -->")
    assert len(before.split()) <= 700
