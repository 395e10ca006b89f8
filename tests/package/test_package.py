"""The package as a whole: imports between its parts, public names, versions, and installation."""

import ast
import importlib.metadata
import inspect
import pathlib

import pytest

import jax_cp_dispatch
from jax_cp_dispatch._ranks import runtime

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent

# Every part may import these; they import no part.
SHARED = {
    *("_arguments", "_command", "_dtypes", "_measuring", "_progress", "_residuals", "_text"),
    *("_warning", "_window"),
}

# Parts of the package, bottom up, and the parts that each may also import.
ALLOWED = {
    **{name: set() for name in SHARED},
    "cpu_devices": set(),
    "_ranks": {"cpu_devices"},
    "launch": {"_ranks"},
    "gpu": {"_ranks"},
    "metadata": set(),
    "scenarios": {"metadata"},
    "cycles": set(),
    "cost": set(),
    "timeline": set(),
    "planner": {"_ranks", "metadata", "cost"},
    "_dispatch": {"_ranks", "metadata"},
    "attention": {"_ranks", "_dispatch", "planner", "cycles", "metadata", "cost", "timeline"},
    "comm_gemm": {"_ranks", "timeline", "cost"},
    "adapters": {"attention", "comm_gemm"},
    "buffers": {"_dispatch", "comm_gemm"},
    "scaling": {"comm_gemm"},
    "profiling": {"attention", "comm_gemm", "timeline"},
    "plots": {"attention", "comm_gemm", "cost", "cycles", "metadata", "planner", "timeline"},
    "doctor": {"_ranks", "_dispatch", "cpu_devices", "metadata", "scenarios"},
    "demo": {"_dispatch", "attention", "cost", "cpu_devices", "planner", "plots"},
    "plan_command": {"attention", "cost", "demo", "metadata", "planner", "plots"},
    "bench_command": {
        *("_ranks", "_dispatch", "attention", "comm_gemm", "cost", "cpu_devices", "metadata"),
        *("planner", "plots"),
    },
}

# Likewise the parts inside a package: its folders and files.
INSIDE = {
    "attention": {
        "local": set(),
        "algorithms": set(),
        "checks": {"local"},
        "options": {"local", "checks"},
        "transport": {"options"},
        "gather": {"options", "transport"},
        "profile": set(),
        "planned": {"local", "checks", "options", "profile"},
        "rotating": {
            *("local", "algorithms", "checks", "options", "transport", "gather", "profile"),
        },
        "moves": set(),
        "choose": {"algorithms", "checks", "moves"},
        "mesh_axes": set(),
        "program": {
            *("algorithms", "checks", "options", "gather", "planned", "rotating", "mesh_axes"),
        },
        "api": {"algorithms", "checks", "options", "rotating", "choose", "mesh_axes", "program"},
    },
    "comm_gemm": {
        "types": set(),
        "checks": {"types"},
        "buffers": {"types", "checks"},
        "scaled": {"types"},
        "engine": {"types", "buffers", "scaled"},
        "layers": {"types", "checks", "scaled", "engine"},
        "choice": {"types", "buffers", "engine"},
        "matmul": {"types", "checks", "scaled", "layers", "choice"},
        "_gemm": {"types", "checks", "buffers", "scaled", "engine", "layers"},
        "_grouped_gemm": {"types", "checks", "scaled", "engine", "layers"},
        "_overlap_profile": set(),
        "_tune": {"choice", "matmul"},
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
        allowed = ALLOWED[part] | {part} | SHARED
        if path.name == "runtime.py":
            allowed |= {"_cpu", "_cuda", "_nvshmem"}  # no other part imports the extensions
        assert set(imported_parts(path, "jax_cp_dispatch")) <= allowed, path


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package(package):
    table, folder = INSIDE[package], SOURCE / package
    for path in folder.rglob("*.py"):
        part = part_of(path, folder)
        if part == "__init__":
            continue
        imported = set(imported_parts(path, f"jax_cp_dispatch.{package}"))
        assert imported <= table[part] | {part}, path


@pytest.mark.parametrize("table", [ALLOWED, *INSIDE.values()], ids=["the package", *INSIDE])
def test_no_import_cycle(table):
    below = set()
    for part, allowed in table.items():
        assert allowed <= below, part
        below.add(part)


def test_public_names_exist_and_are_documented():
    for name in jax_cp_dispatch.__all__:
        assert inspect.getdoc(getattr(jax_cp_dispatch, name)), name
    assert jax_cp_dispatch.__all__ == sorted(jax_cp_dispatch.__all__)


def test_version_matches_the_distribution():
    try:
        installed = importlib.metadata.version("jax_cp_dispatch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed: this is its source tree")
    assert installed == jax_cp_dispatch.__version__


def test_type_information_is_installed():
    assert (SOURCE / "py.typed").is_file()
    assert (SOURCE / "_cpu.pyi").is_file()


GOOD = {
    "jax_version": "0.10.2",
    "jaxlib_version": "0.12.0.1",
    "built_ffi": (0, 3),
    "installed_ffi": (0, 5),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"jax_version": "0.9.2"}, r"found jax 0.9.2 but needs jax>=0.10.2"),
        ({"jaxlib_version": "0.10.1"}, r"found jaxlib 0.10.1 but needs jaxlib>=0.10.2"),
        ({"built_ffi": (0, 6)}, r"built with XLA FFI headers 0.6 but jaxlib 0.12.0.1 offers 0.5"),
        ({"built_ffi": (1, 0)}, r"built with XLA FFI headers 1.0 but jaxlib"),
    ],
)
def test_unsupported_versions_are_rejected_at_import(change, message):
    with pytest.raises(ImportError, match=message):
        runtime.check_versions(**{**GOOD, **change})


def test_supported_versions():
    runtime.check_versions(**GOOD)
    runtime.check_versions(**{**GOOD, "installed_ffi": None, "jax_version": "0.11.0.dev20260101"})


def test_built_with_the_oldest_supported_headers():
    """With newer headers, the CPU backend of an older jaxlib would not start."""
    from jax_cp_dispatch import _cpu

    assert _cpu.ffi_api_version() == (0, 3)
