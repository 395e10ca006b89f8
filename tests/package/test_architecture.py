"""The package as a whole: who imports whom, how many files an addition touches.

Imports and includes follow the table of docs/architecture.md; CONTRIBUTING.md has the numbers.
"""

import ast
import collections
import functools
import importlib.metadata
import inspect
import pathlib
import re

import pytest

import jax_cp_dispatch
from jax_cp_dispatch import attention

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent
ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def nodes_of(path):
    """Returns all nodes of a Python file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def files_of_package():
    return sorted(SOURCE.rglob("*.py"))


# ---- Imports and includes.


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


def part_of(path, package=SOURCE):
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(path):
    """Returns the names of modules, and the names imported from them."""
    for node in nodes_of(path):
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
    for path in files_of_package():
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


@pytest.mark.parametrize("table", [PACKAGE, CSRC], ids=["the package", "csrc"])
def test_no_import_cycle(table):
    below = set()
    for part, allowed in table.items():
        assert allowed <= below, part
        below.add(part)


def in_cycles(imports):
    """Returns those that import each other, and those above them."""
    while ready := [name for name in imports if not imports[name] & imports.keys()]:
        imports = {name: others for name, others in imports.items() if name not in ready}
    return imports


@pytest.mark.parametrize("package", ["attention", "comm_gemm"])
def test_no_cycle_inside_a_package(package):
    """Of its folders and files."""
    folder, imports = SOURCE / package, {}
    for path in folder.rglob("*.py"):
        part = part_of(path, folder)
        imports.setdefault(part, set()).update(imported_parts(path, f"jax_cp_dispatch.{package}"))
    del imports["__init__"]
    assert len(imports) > 5
    assert not in_cycles({part: others - {part} for part, others in imports.items()})


def test_no_cycle_of_files():
    """Late imports inside functions count, too; those of the package itself do not."""
    files = {}
    for path in files_of_package():
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    imports = {}
    for name, path in files.items():
        named = set(imported_modules(path))
        imports[name] = {x if x in files else x.rpartition(".")[0] for x in named}
        imports[name] &= files.keys() - {name, "jax_cp_dispatch"}
    assert not in_cycles(imports)


def test_private_names_of_jax_are_in_one_file():
    using = {
        file.relative_to(SOURCE).as_posix()
        for file in files_of_package()
        if any(name.startswith("jax._") for name in imported_modules(file))
    }
    assert using == {"_jax_private.py"}


def test_the_program_of_a_child_needs_neither_jax_nor_the_package():
    """NVSHMEM ends the child, so its program starts quickly and alone."""
    program = SOURCE / "_ranks/nvshmem_trial.py"
    assert not [x for x in imported_modules(program) if x.startswith("jax")]


MOST_INNER = 13  # files of tests; a lower number is better
IMPORT = re.compile(  # the module and what is imported of it, with comments
    r"^ *(?:from|import) +(jax_cp_dispatch[\w.]*)(?: +import +(\((?:#.*\n|[^)#])*\).*|.*)|.*)$",
    re.M,
)


def imported_names(match):
    """Returns the names of modules, and the names imported from them."""
    module, names = match[1], re.sub("#.*", "", match[2] or "").strip("() \n,")
    return [f"{module}.{name.split()[0]}" for name in names.split(",")] if names else [module]


def is_inner(name):
    """Whether a name is of a module that no user imports: private, or inside a package's folder."""
    _, *parts = name.split(".")
    folder = SOURCE.joinpath(*parts[:-1])
    if parts and not any(folder.glob(f"{parts[-1]}/")) and not any(folder.glob(f"{parts[-1]}.*")):
        parts.pop()  # something of the module
    return len(parts) > 1 or any(re.match("_[^_]", part) for part in parts)


def test_few_tests_import_inner_modules_and_each_says_why():
    """They freeze how the package is built. An import in the file says `# inner: reason`."""
    reasons = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for match in IMPORT.finditer(path.read_text()):
            if any(map(is_inner, imported_names(match))):
                reasons.setdefault(str(path), []).extend(re.findall(r"# inner: \w+", match[0]))
    assert all(reasons.values()), [path for path, found in reasons.items() if not found]
    assert len(reasons) <= MOST_INNER, "\n".join(reasons)


def test_scripts_and_pages_name_tests_that_exist():
    files = [ROOT / "run", ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.sh")]
    for file in [*files, *ROOT.glob("docs/*.md"), *ROOT.glob(".ci/run")]:
        for name in re.findall(r"\btests/[\w/]+\.(?:py|sh|h|cc)\b", file.read_text()):
            assert (ROOT / name).is_file(), f"{file.name}: {name}"


# ---- How many files an addition touches: counted for those that exist.

LISTS = {"attention/algorithms/__init__.py", "attention/__init__.py", "__init__.py"}
TOUCHED = {
    "Chunked": {"masks/static.py", "masks/__init__.py"},
    "BlockCausal": {"masks/static.py", "masks/__init__.py"},
    "linear_attention": {"sequence/recurrences.py", "sequence/__init__.py"},
    "Ulysses": {"attention/algorithms/ulysses.py", *LISTS},
    "Halo": {"attention/algorithms/planned.py", *LISTS},
    # Has a profile, too.
    "Hamilton": {"attention/algorithms/ring.py", "profiling.py", *LISTS},
}


@pytest.mark.parametrize("name", TOUCHED)
def test_a_mask_a_layer_or_an_algorithm_touches_its_lists(name):
    """Beside its own file. Code counts, and texts do not, nor what adapters know by name."""
    has_name = lambda node: name in (getattr(node, "name", ""), getattr(node, "id", ""))
    using = (path for path in files_of_package() if any(map(has_name, nodes_of(path))))
    files = {path.relative_to(SOURCE).as_posix() for path in using}
    assert files - {"adapters/maxtext.py"} == TOUCHED[name]


def test_no_code_compares_the_name_of_an_algorithm():
    """An order of tokens is called "zigzag", too, so that name is not looked for."""
    public = vars(attention).values()
    kinds = [x for x in public if inspect.isclass(x) and issubclass(x, attention.Algorithm)]
    names = {kind.name for kind in kinds if hasattr(kind, "name")} - {"zigzag"}
    assert names >= {"ring", "placed", "ulysses"}
    for path in files_of_package():
        reads_objects = path == SOURCE / "tools/plan.py"
        if reads_objects or part_of(path) in ("attention", "cost"):
            for node in nodes_of(path):
                if isinstance(node, ast.Compare | ast.Match):
                    constants = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
                    assert not constants & names, path


# ---- Three rules: arguments are read once, a file is a subject, the path of a call is a budget.
# `test_paths.py` holds the third.

MASKS_AND_LAYERS = {"masks", "sequence"}  # lists to which users add
TOPICS = {"gpu"}  # public names of other parts


def importers(name):
    """Returns how many files of the package import a module or something of it."""
    is_of = lambda x: x == name or x.startswith(f"{name}.")
    return sum(any(map(is_of, imported_modules(path))) for path in files_of_package())


def test_a_file_is_a_subject():
    """No file is under 80 lines, unless three others import it or users add files like it."""
    for path in files_of_package():
        if (
            path.name in ("__init__.py", "__main__.py")
            or part_of(path) in MASKS_AND_LAYERS | TOPICS
        ):
            continue
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= 700, f"{path}: {num_lines} lines"
        assert num_lines >= 80 or importers(name) >= 3, f"{path}: {num_lines} lines"


def test_no_private_function_has_more_than_six_parameters():
    for path in files_of_package():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name):
                of = node.args
                parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs]
                assert len(parameters) <= 6, f"{path}: {node.name}"


def test_nothing_small_is_named_for_one_use():
    """A private function of few lines with one caller, a class with one maker and no method."""
    uses, called = collections.Counter(), collections.Counter()
    for path in files_of_package():
        for node in nodes_of(path):
            uses[getattr(node, "id", getattr(node, "attr", ""))] += 1
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called[node.func.id] += 1
    for path in files_of_package():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name):
                is_small = (node.end_lineno or 0) - node.lineno < 5 and not node.decorator_list
                assert not is_small or uses[node.name] > 1 or not called[node.name], (
                    f"{path}: {node.name}"
                )
            elif isinstance(node, ast.ClassDef) and uses[node.name] == called[node.name] == 1:
                has_methods = any(isinstance(x, ast.FunctionDef) for x in node.body)
                assert has_methods, f"{path}: {node.name}"


# ---- Installation.


def test_version_and_types_are_installed():
    assert (SOURCE / "py.typed").is_file() and (SOURCE / "_cpu.pyi").is_file()
    try:
        installed = importlib.metadata.version("jax_cp_dispatch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed: this is its source tree")
    assert installed == jax_cp_dispatch.__version__
