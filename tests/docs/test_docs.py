"""Links, paths, names and numbers of the pages are right; the API reference is complete.

Sphinx is not needed: `./run docs` builds the pages and treats warnings as errors.
"""

import importlib
import inspect
import pathlib
import pkgutil
import re

import jax_cp_dispatch

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


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
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_readme_reaches_its_results_within_700_words():
    before, _ = (ROOT / "README.md").read_text().split("\n<!-- benchmarks:begin -->")
    assert len(before.split()) <= 700


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


# ---- The API reference, and the page on names, have every public name once, and nothing else.


def public_objects():
    """Maps each name to the modules without an underscore that export it."""
    found = pkgutil.iter_modules(jax_cp_dispatch.__path__)
    names = [f"jax_cp_dispatch.{x.name}" for x in found if not x.name.startswith("_")]
    homes: dict[str, list] = {}
    for module in (jax_cp_dispatch, *map(importlib.import_module, names)):
        for name in getattr(module, "__all__", ()):
            if not inspect.ismodule(getattr(module, name)):
                homes.setdefault(name, []).append(module)
    return homes


def documented():
    """Yields the page, module and name of every directive on the API pages."""
    for page in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if found := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = found[1]
            elif found := re.match(r"\.\. auto(?:function|class|data):: (\S+)", line):
                yield page.name, module, found[1]


def test_every_public_name_means_one_thing_and_is_on_one_page():
    public, names = public_objects(), [name for _, _, name in documented()]
    for name, modules in public.items():
        first, *others = (getattr(module, name) for module in modules)
        assert all(other is first for other in others), name
    assert not set(public) - set(names), "add these to a page of docs/api"
    assert not set(names) - set(public), "these are not public"
    assert len(names) == len(set(names))


def test_pages_name_the_module_to_import_from_and_every_name_has_a_docstring():
    for page, module, name in documented():
        home = importlib.import_module(module)
        assert name in home.__all__, f"{page}: {module}.{name}"
        if name in jax_cp_dispatch.__all__:
            assert home is jax_cp_dispatch, f"{page}: {name} is imported from the top"
        thing = getattr(home, name)
        assert not callable(thing) or inspect.getdoc(thing), f"{module}.{name}"


def exists_here(token, keywords):
    name = token.split("=")[0]
    if "/" in name:
        return (ROOT / name).exists()
    thing = jax_cp_dispatch
    for part in name.split("."):
        fields = getattr(thing, "__dataclass_fields__", {})
        if not hasattr(thing, part) and part not in fields:
            return name in keywords
        thing = getattr(thing, part, None)
    return True


def test_names_in_the_comparison_exist():
    things = [getattr(module, name) for name, (module, *_) in public_objects().items()]
    functions = [thing for thing in things if inspect.isfunction(thing)]
    parameters = {x for function in functions for x in inspect.signature(function).parameters}
    text = (DOCS / "names.md").read_text()
    rows = re.findall(r"^\| (?!there)(.*) \|(.*)\|(.*)\|$", text, re.M)
    tokens = [token for _, here, _ in rows for token in re.findall(r"`([^`]+)`", here)]
    assert len(rows) > 45 and "dispatch_qkv" in tokens
    assert not [token for token in tokens if not exists_here(token, parameters)]
