#!/usr/bin/env bash
# Builds the CUDA extensions without a GPU: build.sh PYTHON FOLDER [install]. Fails if a kernel
# spills registers or has a stack frame, if its machine code is bad (csrc/cuda/check_machine_code.py;
# needs cuobjdump and nvdisasm), if an extension does not load, or if _cuda needs CUDA to load.
# `install` first puts them next to the package's sources, even if a check fails. Needs cmake, ninja
# and nvcc in PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$1 folder=$2 install=${3:-}
architectures=${ARCHITECTURES:-80-real 90-real 100-real}

mkdir -p "$folder"
cmake -S "$root" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCPD_CUDA=ON \
  -DCMAKE_CUDA_ARCHITECTURES="${architectures// /;}" \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$folder/configure.log" || {
  tail -n 30 "$folder/configure.log"
  exit 1
}
touch "$root"/csrc/cuda/*.cu  # compiled each time, because its log is checked
cmake --build "$folder" >"$folder/build.log" 2>&1 || { tail -n 60 "$folder/build.log"; exit 1; }
if [ "$install" = install ]; then
  for extension in "$folder"/_*.so; do
    cp --remove-destination "$extension" "$root/jax_cp_dispatch/"
  done
fi
"$python" "$root/csrc/cuda/check_kernels.py" "$folder/build.log" ${architectures//-real/}

tools=$("$python" -c '
import importlib.util
nvidia = importlib.util.find_spec("nvidia")
print(*(f"{at}/cu13/bin" for at in nvidia.submodule_search_locations) if nvidia else "", sep=":")
')
if (PATH=$PATH:$tools && command -v cuobjdump nvdisasm >/dev/null); then
  PATH=$PATH:$tools "$python" "$root/csrc/cuda/check_machine_code.py" "$folder"/_cuda*.so
else
  echo "build.sh: no cuobjdump or nvdisasm, so the machine code is not checked" >&2
fi

for extension in "$folder"/_cuda*.so "$folder"/_nvshmem*.so; do
  [ -f "$extension" ] || continue
  libraries=$(readelf -d "$extension" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p')
  echo "$(basename "$extension") needs" $libraries
  case "$(basename "$extension") $libraries" in
    _cuda*libcu* | _cuda*libnv*) echo "build.sh: _cuda must load without CUDA" >&2; exit 1 ;;
  esac
done
(cd "$folder" && "$python" -c '
import _cuda
print("_cuda loads;", *_cuda.registrations(), "- GPUs:", *_cuda.device_count())')
[ ! -f "$(echo "$folder"/_nvshmem*.so)" ] || (cd "$folder" && "$python" -c '
import _nvshmem
print("_nvshmem loads; NVSHMEM", _nvshmem.version())')
