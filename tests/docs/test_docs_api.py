"""The API reference and the page on names list every public name once, and nothing else.

Sphinx is not needed: `./run docs` builds the pages and treats warnings as errors.
"""

import importlib
import inspect
import pathlib
import pkgutil
import re

import jax_cp_dispatch

ROOT = pathlib.Path(__file__).parents[2]
API = ROOT / "docs" / "api"


def public_modules():
    """Returns the package and its modules without an underscore in their names."""
    yield jax_cp_dispatch
    for found in pkgutil.iter_modules(jax_cp_dispatch.__path__):
        if not found.name.startswith("_"):
            yield importlib.import_module(f"jax_cp_dispatch.{found.name}")


def public_objects():
    """Maps each name to the modules that export it."""
    homes: dict[str, list] = {}
    for module in public_modules():
        for name in getattr(module, "__all__", ()):
            if not inspect.ismodule(getattr(module, name)):
                homes.setdefault(name, []).append(module)
    return homes


def documented():
    """Yields the page, module and name of every directive on the API pages."""
    for page in sorted(API.glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if found := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = found[1]
            elif found := re.match(r"\.\. auto(?:function|class|data):: (\S+)", line):
                yield page.name, module, found[1]


def test_one_name_means_one_thing():
    for name, modules in public_objects().items():
        first, *others = (getattr(module, name) for module in modules)
        assert all(other is first for other in others), name


def test_every_public_name_is_on_one_page():
    names = [name for _, _, name in documented()]
    assert not set(public_objects()) - set(names), "add these to a page of docs/api"
    assert not set(names) - set(public_objects()), "these are not public"
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
    parameters = set()
    for name, (module, *_) in public_objects().items():
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            parameters |= set(inspect.signature(thing).parameters)
    rows = re.findall(
        r"^\| (?!there)(.*) \|(.*)\|(.*)\|$", (ROOT / "docs/names.md").read_text(), re.M
    )
    tokens = [token for _, here, _ in rows for token in re.findall(r"`([^`]+)`", here)]
    assert len(rows) > 45 and "dispatch_qkv" in tokens
    absent = [token for token in tokens if not exists_here(token, parameters)]
    assert not absent
