"""Imports and includes follow the table of docs/architecture.md, and have no cycle."""

import ast
import inspect
import pathlib
import re

import pytest

import jax_cp_dispatch

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent
ROOT = pathlib.Path(__file__).parents[2]


def tables_of_page():
    """Returns, bottom up, the parts of the package and of csrc with those that each may import.

    Every part of the package may import those of the first row.
    """
    package, csrc, shared = {}, {}, set()
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        names, _, imports = line.strip("|").split(" | ")
        names = re.findall(r"`(?:csrc/)?(\w+)(?:/|\.py)`", names)
        allowed = set(re.findall(r"\w+", imports))
        if "csrc/" in line.split("|")[1]:
            csrc |= dict.fromkeys(names, set(csrc) if "all" in allowed else allowed)
        else:
            package |= dict.fromkeys(names, allowed - {"the", "extensions"})
            shared = shared or set(names)
    return package, csrc, shared


PACKAGE, CSRC, SHARED = tables_of_page()

# The folders and files inside a package, likewise.
INSIDE = {
    "attention": {
        "peer_arguments": set(),
        "local": {"peer_arguments"},
        "operands": {"local"},
        "latents": {"local", "operands"},
        "call_options": {"latents", "local", "operands"},
        "rotating": {"latents", "local", "operands", "call_options"},
        "algorithms": {"latents", "local", "operands", "call_options", "rotating"},
        "choose": {"algorithms"},
        "auto": {"algorithms", "choose", "latents", "operands", "call_options"},
        "expanded_heads": {"latents", "operands"},
        "context_parallel": {
            *("peer_arguments", "local", "operands", "latents", "call_options"),
            *("algorithms", "auto", "expanded_heads"),
        },
        "profile": {
            *("local", "operands", "call_options", "rotating", "algorithms", "auto"),
        },
    },
    "comm_gemm": {
        "types": set(),
        "buffers": {"types"},
        "scaled": {"types"},
        "engine": {"types", "buffers", "scaled"},
        "layers": {"types", "scaled", "engine"},
        "choice": {"types", "buffers", "engine"},
        "matmul": {"types", "scaled", "layers", "choice"},
        "_gemm": {"types", "buffers", "scaled", "engine", "layers"},
        "_grouped_gemm": {"types", "scaled", "engine", "layers"},
        "_overlap_profile": set(),
    },
}


def part_of(path, package=SOURCE):
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(path):
    """Returns the names of modules, and the names imported from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_parts(path, package):
    """Returns the parts of `package`, given its dotted name, that a file imports."""
    for module in imported_modules(path):
        if module == package:
            yield "the top"
        elif module.startswith(f"{package}."):
            yield module.removeprefix(f"{package}.").split(".")[0]


def test_imports_follow_the_architecture():
    for path in SOURCE.rglob("*.py"):
        part = part_of(path)
        if part in ("__init__", "__main__"):
            continue
        allowed = PACKAGE[part] | {part} | SHARED
        if path.name == "runtime.py":
            allowed |= {"_cpu", "_cuda", "_nvshmem"}  # no other part imports the extensions
        assert set(imported_parts(path, "jax_cp_dispatch")) <= allowed, path


@pytest.mark.parametrize("part", CSRC)
def test_includes_follow_the_architecture(part):
    """Other files are included by their path in csrc; those of CUDA and XLA are not checked."""
    for path in (ROOT / "csrc" / part).rglob("*.*"):
        if path.suffix not in (".h", ".cc", ".cu"):
            continue
        included = set(re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE))
        assert included & CSRC.keys() <= CSRC[part] | {part}, path


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package(package):
    table, folder = INSIDE[package], SOURCE / package
    for path in folder.rglob("*.py"):
        part = part_of(path, folder)
        if part == "__init__":
            continue
        imported = set(imported_parts(path, f"jax_cp_dispatch.{package}"))
        assert imported <= table[part] | {part}, path


TABLES = {"the package": PACKAGE, "csrc": CSRC, **INSIDE}


@pytest.mark.parametrize("table", TABLES)
def test_no_import_cycle(table):
    below = set()
    for part, allowed in TABLES[table].items():
        assert allowed <= below, part
        below.add(part)


def test_no_cycle_of_files():
    """Late imports inside functions count, too; those of the package itself do not."""
    files = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    imports = {}
    for name, path in files.items():
        named = set(imported_modules(path))
        imports[name] = {x if x in files else x.rpartition(".")[0] for x in named}
        imports[name] &= files.keys() - {name, "jax_cp_dispatch"}
    while ready := [name for name in imports if not imports[name] & imports.keys()]:
        for name in ready:
            del imports[name]
    assert not imports


def test_private_names_of_jax_are_in_one_file():
    using = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if any(name.startswith("jax._") for name in imported_modules(file))
    }
    assert using == {"_jax_private.py"}


def test_the_program_of_a_child_needs_neither_jax_nor_the_package():
    """NVSHMEM ends the child, so its program starts quickly and alone."""
    program = SOURCE / "_ranks/gpu/nvshmem_trial.py"
    assert not [x for x in imported_modules(program) if x.startswith("jax")]
