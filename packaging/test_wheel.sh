#!/usr/bin/env bash
# Installs the wheel that fits an interpreter in a clean environment, with nothing but what the wheel
# requires, and runs the first example, the doctor and some tests away from the checkout.
# usage: packaging/test_wheel.sh PYTHON FOLDER_OF_WHEELS UNPACKED_SOURCE
set -euo pipefail
python=$1 wheels=$2 source=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Without the package's folder, an import can only find what was installed.
cp -r "$source"/{tests,examples,pyproject.toml} "$work"
cd "$work"

"$python" -m venv environment
pip=(environment/bin/python -m pip --disable-pip-version-check --quiet)
# Requirements from the index, the package itself from the folder alone.
wheel=$("${pip[@]}" download --no-deps --no-index --find-links "$wheels" --dest chosen \
        --only-binary :all: jax_cp_dispatch && echo chosen/*.whl)
"${pip[@]}" install "$wheel"
environment/bin/python examples/01_simple_usage.py
environment/bin/python -m jax_cp_dispatch doctor

# The suite's tools come after the example: the package must not need them.
"${pip[@]}" install pytest hypothesis beartype
tests=(tests/dispatch/test_dispatch.py tests/metadata/test_metadata.py tests/planning/test_plans.py)
environment/bin/python -m pytest -q "${tests[@]}" | tee result
num_passed=$(grep -oE '[0-9]+ passed' result | cut -d' ' -f1)
[ "$num_passed" -ge 50 ] || { echo "wheels: $num_passed tests passed, at least 50 are needed" >&2; exit 1; }
echo "wheels: $(basename "$wheel") works with $("$python" --version)"
