"""Builds the extension for GPUs with a planted fault, for stress_processes.py.

    python tests/gpu/planted_fault.py BUILD OUTPUT [--fault early-signal]

Compiles one file again, with the changed header, and links it with the other objects of BUILD, a
folder of CMake with Ninja in which the extension has been built. OUTPUT is the new extension.
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
# By name: the header, and pairs of texts, what is there and what replaces it.
FAULTS = {
    "early-signal": ("kernels/push_take.h", [("block_.index == 0 && Gets", "true || Gets")]),
    "no-order": (
        "kernels/block.h",
        [
            ("st.release.sys.global.u64", "st.relaxed.sys.global.u64"),
            ("atom.acq_rel.sys.global.add.u64", "atom.relaxed.sys.global.add.u64"),
        ],
    ),
}
_FILE = "csrc/cuda/kernels.cu"


def package_with(extension: str, folder: pathlib.Path) -> str:
    """Makes the package in `folder`, with another extension; returns a path to import it from."""
    package = folder / "jax_cp_dispatch"
    package.mkdir()
    for file in (ROOT / "jax_cp_dispatch").iterdir():
        is_own = file.name.startswith("_cuda.")
        (package / file.name).symlink_to(pathlib.Path(extension).resolve() if is_own else file)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def commands_of(build: pathlib.Path, target: str) -> list[str]:
    listed = subprocess.run(
        ["ninja", "-C", str(build), "-t", "commands", target],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return listed.stdout.splitlines()


def plant(fault: str, folder: pathlib.Path) -> None:
    """Copies the sources to `folder`, with the fault."""
    shutil.copytree(ROOT / "csrc", folder / "csrc", dirs_exist_ok=True)
    name, changes = FAULTS[fault]
    header = folder / "csrc" / name
    text = header.read_text()
    for there, instead in changes:
        if there not in text:
            raise SystemExit(f"{name} has changed: no {there.strip().splitlines()[0]!r}")
        text = text.replace(there, instead)
    header.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--fault", choices=FAULTS, default="early-signal")
    options = parser.parse_args()
    build, output = options.build.resolve(), options.output.resolve()
    folder = build / "mutant"
    plant(options.fault, folder)
    object_ = folder / "kernels.cu.o"
    (compile_,) = [line for line in commands_of(build, "_cuda") if f"-c {ROOT / _FILE}" in line]
    compile_ = compile_.replace(str(ROOT / "csrc"), str(folder / "csrc"))
    compile_ = re.sub(r"-MD -MT \S+ -MF \S+", "", compile_)  # those of the other object
    compile_ = re.sub(r"-o \S+kernels\.cu\.o", f"-o {shlex.quote(str(object_))}", compile_)
    subprocess.run(compile_, shell=True, check=True, cwd=build)
    library = folder / "libcpd_cuda.a"
    shutil.copy(build / "libcpd_cuda.a", library)
    subprocess.run(["ar", "r", str(library), str(object_)], check=True)
    link = commands_of(build, "_cuda")[-1]
    link = re.sub(r"-o (_cuda\S*\.so)", f"-o {shlex.quote(str(output))}", link)
    subprocess.run(link.replace("libcpd_cuda.a", str(library)), shell=True, check=True, cwd=build)
    print(f"{output}: {options.fault}")


if __name__ == "__main__":
    main()
