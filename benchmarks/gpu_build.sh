#!/usr/bin/env bash
# The extensions of gpu_report.sh, which reads this file: how they are built, or taken from a folder
# if they were built from the same sources. Uses its variables python, build, given, out, architecture.

sources() {  # a checksum of what the extensions are built from
  find csrc tests/native CMakeLists.txt -type f | LC_ALL=C sort | xargs cat | cksum | cut -d' ' -f1
}

stamp() {  # what a build is for
  echo "$(sources) sm_$architecture $("$python" - <<'PYTHON'
import importlib.util, pathlib, re, sys
from importlib import metadata

spec = importlib.util.find_spec("jaxlib")
header = pathlib.Path(spec.submodule_search_locations[0], "include/xla/ffi/api/c_api.h")
ffi = re.findall(r"define XLA_FFI_API_M\w+OR (\d+)", header.read_text())
nvshmem = next((d.version for d in metadata.distributions()
                if (d.metadata["Name"] or "").startswith("nvidia-nvshmem")), "none")
print(*sys.version_info[:2], "ffi", *ffi, "nvshmem", nvshmem)
PYTHON
)"
}

is_given() {
  [ -f "$given/stamp" ] || return
  [ "$(cat "$given/stamp")" = "$(stamp)" ] || {
    echo "given: for $(cat "$given/stamp"), but this is $(stamp)"
    return 1
  }
}

import_package() {  # fails unless the package itself accepts the extensions
  "$python" - <<'PYTHON'
import sys
from jax_cp_dispatch._ranks import runtime

if runtime.cuda is None:
    sys.exit(runtime.cuda_reason)
print("imported:", *runtime.cuda.registrations(), "- GPUs:", *runtime.cuda.device_count())
PYTHON
}

install() {  # install FOLDER NAME...: puts extensions next to the package
  local folder=$1 name extension
  shift
  for name in "$@"; do
    for extension in "$folder/$name".*so; do
      [ -f "$extension" ] && cp --remove-destination "$extension" jax_cp_dispatch/
    done
  done
}

configure() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCPD_CUDA=ON -DCPD_BUILD_TESTS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$out/configure.log" ||
    { tail -n 30 "$out/configure.log"; return 1; }
}

build_first() {
  configure && cmake --build "$build" --target _cpu _cuda test_kernels
}

build_nvshmem() {  # next to steps that use the GPU
  grep -q "NVSHMEM: " "$out/configure.log" || { grep "NVSHMEM was not found" "$out/configure.log"; return 1; }
  cmake --build "$build" --target _nvshmem
}
