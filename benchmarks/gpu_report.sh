#!/usr/bin/env bash
# Everything that one GPU can tell, in one go: gpu_report.sh [--dry-run] [--budget SECONDS] [FOLDER].
# Builds from this tree without network and for this GPU only, tests and measures. The steps come in
# the order of their worth, and later ones run also when one fails. Each has a time limit of its own,
# and at most what is left of the budget (540 s); a line at the end says what was left out. STEPS, a
# regular expression, chooses among them: `STEPS='gemm|bandwidth' gpu_report.sh` repeats two.
#
# FOLDER is where report.txt (all output, as it comes) and report.json go, and is made if it is not
# there: `benchmarks/gpu_report.sh /mnt/results`; by default benchmarks/results/gpu. PYTHON names an
# interpreter with jax, its CUDA plugin, nanobind, pytest, hypothesis, cmake and ninja; where it has
# pytest-xdist, several tests of one GPU run at a time.
#
# GIVEN names a folder with extensions and test_kernels of this tree, built elsewhere by this script
# (`ARCHITECTURE=90 gpu_report.sh --build-only FOLDER`). They are used if their stamp (sources, GPU,
# Python, versions of XLA's FFI and of NVSHMEM) is that of this machine, and if the package imports
# with them; otherwise everything is built here. --dry-run checks every command and runs none; it says what
# is left out if every step takes its limit (a line of the smoke table: what it usually takes).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
mode=run
budget=540
while [[ ${1:-} == -* ]]; do
  case "$1" in
    --dry-run) mode=dry ;;
    --build-only) mode=build ;;
    --budget) budget=${2:-none}; shift ;;
    *) budget=none ;;
  esac
  [[ $budget =~ ^[1-9][0-9]*$ ]] || {
    echo "usage: gpu_report.sh [--dry-run | --build-only] [--budget SECONDS] [FOLDER]" >&2
    exit 2
  }
  shift
done
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD:-build/gpu_report}
given=${GIVEN:-build/given}
end=$((budget - (budget > 100 ? 10 : 1)))  # seconds; the rest is for what follows the steps
supposed=0  # seconds that the steps of a dry run would have taken
usual=      # seconds of a step, if usually much less than its limit
left_out=()
shortest=5  # seconds with which a step is begun
report=$out/report.txt
steps=$out/steps.tsv
: >"$report"
: >"$steps"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 JAX_CP_DISPATCH_REQUIRE_GPU=1
export CUDA_DEVICE_MAX_CONNECTIONS=32  # hardware queues: one GPU holds the streams of many ranks
export JAX_CP_DISPATCH_TEST_LIMIT=40   # seconds of a test
export JAX_CP_DISPATCH_PROCESS_LIMIT=30  # and of all processes that one starts
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$root/build/gpu_report_cache}
command -v nvcc >/dev/null || export PATH=$PATH:/usr/local/cuda/bin

check() {  # check COMMAND...: says what a command lacks; used instead of running it
  local word
  while case "$1" in env | timeout | *=*) true ;; *) false ;; esac; do shift; done
  command -v "$1" >/dev/null || { echo "no $1"; return 127; }
  for word in "$@"; do
    case "$word" in
      *.py) "$python" -c 'import ast, sys; ast.parse(open(sys.argv[1]).read())' "$word" || return ;;
      *.sh) bash -n "$word" || return ;;
    esac
  done
}

is_chosen() {  # is_chosen NAME: the machine and the builds always are
  case "$1" in machine | build | import | "build nvshmem") return 0 ;; esac
  [ -z "${STEPS:-}" ] || [[ $1 =~ $STEPS ]]
}

step() {  # step NAME SECONDS COMMAND...: runs it, and notes how it went
  local name=$1 limit=$2 began=$SECONDS status left
  shift 2
  is_chosen "$name" || return 1
  if [ "$mode" = dry ]; then left=$((end - supposed)); else left=$((end - SECONDS)); fi
  if [ "$left" -lt "$((limit < shortest ? limit : shortest))" ]; then
    left_out+=("$name")
    printf '%s\tleft out\t0\n' "$name" >>"$steps"
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$mode" = dry ]; then
    local lacks
    lacks=$(check "$@" 2>&1)
    status=$?
    supposed=$((supposed + (usual && usual < limit ? usual : limit)))
    printf '%s\t%s\t%s\t%s\n' "$status" "$limit" "$name" "${lacks:-$*}"
    printf '%s\t%s\t0\n' "$name" "$status" >>"$steps"
    return "$status"
  fi
  echo "== $name: from $began s on, at most $limit s" | tee -a "$report"
  # Interrupted, not terminated: pytest then tells what has failed so far.
  timeout --signal=INT --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$report"
  status=${PIPESTATUS[0]}
  note "$name" "$status" "$((SECONDS - began))"
}

note() {  # note NAME STATUS SECONDS: how a step went; fails if it failed
  echo "-- $1: status $2 after $3 s" | tee -a "$report"
  printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$steps"
  [ "$2" = 0 ]
}

. benchmarks/gpu_build.sh
export -f configure build_first build_nvshmem import_package
export build out python

architecture=${ARCHITECTURE:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
  head -1 | tr -d .)}
export architecture=${architecture:-90}

if [ "$mode" = build ]; then
  build_first && build_nvshmem
  cp --remove-destination "$build"/_*.so "$build/test_kernels" "$out/" && stamp >"$out/stamp"
  rm -f "$report" "$steps" "$out/configure.log"
  exit
fi

versions() {
  nvcc --version | tail -n 2
  "$python" -m pip list 2>/dev/null | grep -iE "jax|nvidia|nanobind|numpy|pytest"
  nvidia-smi
}
export -f versions
step machine 10 bash -c versions
untuned="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"  # tests are small and many
recorded="$untuned --xla_gpu_graph_min_graph_size=1"  # or nothing is recorded
measured="${XLA_FLAGS:-} --xla_gpu_enable_triton_gemm=false"  # cuBLAS alone: nothing to tune

# JAX's first programs load its libraries, which takes long. Beside the build: they need no part of
# this package.
warm_up() {
  env JAX_PLATFORMS=cuda XLA_FLAGS="$measured" "$python" - <<'PYTHON'
import time
import jax, jax.numpy as jnp

began = time.monotonic()
say = lambda what: print(f"{what} after {time.monotonic() - began:.1f} s", flush=True)
print(jax.__version__, jax.devices())
x = jnp.ones((1024, 1024), jnp.bfloat16)
jax.block_until_ready(x @ x)
say("a product")
q = jnp.ones((1, 1024, 8, 128), jnp.bfloat16)
attend = lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
jax.block_until_ready(jax.jit(jax.grad(lambda q: attend(q).astype(jnp.float32).sum()))(q))
say("attention of cuDNN and its gradient")
f8 = x.astype(jnp.float8_e4m3fn)
jax.block_until_ready(jax.lax.dot(f8, f8, preferred_element_type=jnp.bfloat16))
say("a product in 8 bits")
PYTHON
}
export -f warm_up
export measured
warming=
if [ "$mode" = run ] && is_chosen warm-up; then
  { nice timeout 90 bash -c warm_up; echo "warm-up: status $?"; } >"$out/warm_up.log" 2>&1 &
  warming=$!
fi
export warming
await() {  # await PROCESS LOG: until it ends; the log says with which status
  while kill -0 "$1" 2>/dev/null; do sleep 1; done
  cat "$2"
  ! grep -q "status [1-9]" "$2"
}
export -f await

# ---- The extensions.
kernels=$build/test_kernels
if [ "$mode" = run ] && is_given | tee -a "$report" &&
  install "$given" _cpu _cuda _nvshmem && step import 20 bash -c import_package; then
  kernels=$given/test_kernels
else
  step build 120 bash -c build_first && [ "$mode" = run ] && install "$build" _cpu _cuda
  step import 20 bash -c import_package
fi
if [ "$mode" = dry ]; then kernels=true; fi
[ -z "$warming" ] && [ "$mode" = run ] ||
  usual=10 step warm-up 90 bash -c 'await "$warming" "$out/warm_up.log"'
rm -f "$out/warm_up.log"

# ---- The kernels without JAX.
step kernels 15 "$kernels" 20
step "kernel times" 25 "$kernels" time "$out/kernels.json"

# NVSHMEM apart: it takes longer to build, and everything else works without it.
nvshmem=
for step in "smoke: nvshmem" "smoke: put" "4 by NVSHMEM" "4 by put and get"; do
  ! is_chosen "$step" || needs_nvshmem=1
done
if [ "$mode" = run ] && [ "$kernels" = "$build/test_kernels" ] && [ -n "${needs_nvshmem:-}" ]; then
  { nice bash -c build_nvshmem; echo "build: status $?"; } >"$out/nvshmem.log" 2>&1 &
  nvshmem=$!
fi
export nvshmem

# ---- The smoke table: each line its own process, up to three at a time.
smoke_line() {  # smoke_line LINE: tests of one operation
  local id
  case "$1" in
    dispatch | combine) id="test_one_gpu.py::test_cases_of_all_ranks[4-$1]" ;;
    pair) id="test_one_gpu.py::test_cases_of_all_ranks[4-dispatch_start]" ;;
    bf16) id="test_one_gpu_gemm.py::test_epilogues_equal_those_of_xla[48-bfloat16]" ;;
    fp8) id="test_one_gpu_gemm.py::test_tensor_scales[dims1-True]" ;;
    causal | packed) id="test_gpu_attention.py::test_equals_numpy[$1-bfloat16]" ;;
    ipc) id="test_gpu_processes.py::test_exchanges_between_processes[2-cuda_ipc]" ;;
    nvshmem) id="test_gpu_processes.py::test_exchanges_between_processes[2-nvshmem]" ;;
    put) id="test_gpu_processes.py::test_exchanges_by_put_and_get[2]" ;;
  esac
  env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$untuned" \
    XLA_PYTHON_CLIENT_MEM_FRACTION=.2 "$python" -m pytest -q "tests/gpu/$id"
}
export -f smoke_line
export untuned

smoke() {  # smoke SECONDS LINE...: these lines at a time
  local limit=$1 began=$SECONDS left=$((end - SECONDS)) line lines=()
  shift
  for line; do ! is_chosen "smoke: $line" || lines+=("$line"); done
  if [ "$mode" = dry ] || [ "$left" -lt "$shortest" ]; then
    for line in ${lines[@]+"${lines[@]}"}; do
      usual=5 step "smoke: $line" "$limit" bash -c 'smoke_line "$1"' - "$line"
    done
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  for line in ${lines[@]+"${lines[@]}"}; do
    echo "== smoke: $line: from $began s on, at most $limit s" | tee -a "$report"
    {
      timeout --signal=INT --kill-after=5 "$limit" bash -c 'smoke_line "$1"' - "$line" \
        >"$out/smoke.$line" 2>&1
      echo $? >"$out/smoke.$line.status"
    } &
    jobs[${#jobs[@]}]=$!
  done
  [ "${#jobs[@]}" = 0 ] || wait "${jobs[@]}"
  jobs=()
  for line in ${lines[@]+"${lines[@]}"}; do
    tee -a "$report" <"$out/smoke.$line"
    note "smoke: $line" "$(cat "$out/smoke.$line.status")" "$((SECONDS - began))"
    rm -f "$out/smoke.$line" "$out/smoke.$line.status"
  done
}
jobs=()
smoke 20 dispatch combine pair
smoke 20 bf16 fp8
smoke 45 causal packed
smoke 45 ipc
if [ -n "$nvshmem" ]; then
  step "build nvshmem" 45 bash -c 'await "$nvshmem" "$out/nvshmem.log"' &&
    install "$build" _nvshmem
fi
smoke 45 nvshmem put
rm -f "$out/nvshmem.log"

# ---- Between GPUs: what they compute, then how fast.
between() {  # between NAME SECONDS COMMAND...
  usual=60 step "between GPUs: $1" "$2" env JAX_PLATFORMS=cuda,cpu JAX_CP_DISPATCH_TEST_LIMIT=0 \
    JAX_CP_DISPATCH_PROCESS_LIMIT=$(($2 - 10)) "${@:3}"
}
gpus=$("$python" -c 'from jax_cp_dispatch._ranks import runtime
print(runtime.cuda.device_count()[0] if runtime.cuda else 0)' 2>/dev/null)
if [ "${gpus:-0}" -ge 2 ] || { [ "$mode" = dry ] && [ "${gpus:-0}" = 0 ]; }; then
  for case in "one process" cuda_ipc nvshmem "put and get"; do
    between "$case" 180 XLA_FLAGS="$untuned" "$python" -m pytest -q \
      "tests/gpu/test_gpu_processes.py::test_every_operation[$case]"
  done
  between rates 240 LIMIT=100 benchmarks/multi_gpu.sh --sizes quick --output "$out/between_gpus.json"
elif is_chosen "between GPUs"; then
  echo "between GPUs: one GPU" | tee -a "$report"
  printf 'between GPUs\tone GPU\t0\n' >>"$steps"
fi

# ---- Measurements.
step bandwidth 30 env JAX_PLATFORMS=cuda "$python" benchmarks/gpu_exchange.py \
  --repeats 3 --output "$out/bandwidth.json"
libraries=$("$python" -c 'import nvidia; print(*(at + "/cu13/lib" for at in nvidia.__path__), sep=":")' \
  2>/dev/null):/usr/local/cuda/lib64  # cuBLASLt
step "small calls" 20 "$kernels" small "$out/small_calls.json"
step "blocks beside a GEMM" 30 env LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  "$kernels" beside "$out/blocks_beside_gemm.json"
step gemm 60 env JAX_PLATFORMS=cuda XLA_FLAGS="$measured --xla_gpu_enable_command_buffer=" \
  "$python" benchmarks/gpu_gemm.py --repeats 3 --output "$out/gemm.json"
step "profile beside a GEMM" 40 env JAX_PLATFORMS=cuda \
  XLA_FLAGS="$measured --xla_gpu_enable_command_buffer=" \
  "$python" benchmarks/gpu_profile.py --output "$out/profile_beside_gemm.json"
step "attention rate" 120 env JAX_PLATFORMS=cuda XLA_FLAGS="$measured" "$python" \
  benchmarks/gpu_attention.py --output "$out/attention.json"
ncu=$(command -v ncu || echo /usr/local/cuda/bin/ncu)
if [ -x "$ncu" ]; then
  step profile 40 "$ncu" --clock-control none --kernel-name 'regex:Push|Unpack|Pull' --metrics \
    "$(printf '%s,' dram__throughput.avg.pct_of_peak_sustained_elapsed \
      dram__bytes.sum.per_second sm__warps_active.avg.pct_of_peak_sustained_active)$(
      printf 'regex:smsp__average_warps_issue_stalled_.*_per_issue_active.ratio')" \
    "$kernels" profile
fi

# ---- Tests of one GPU: as many at a time as its memory holds.
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1)
at_once=(XLA_PYTHON_CLIENT_MEM_FRACTION=.75)
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then
  # The fraction is that of each worker; the rest is for channels.
  if [ "${memory:-0}" -ge 120000 ]; then
    at_once=(XLA_PYTHON_CLIENT_MEM_FRACTION=.12)
    workers=(-n 6)
  elif [ "${memory:-0}" -ge 75000 ]; then
    at_once=(XLA_PYTHON_CLIENT_MEM_FRACTION=.22)
    workers=(-n 3)
  fi
fi
step "one GPU" 100 env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$recorded" "${at_once[@]}" \
  "$python" -m pytest -q ${workers[@]+"${workers[@]}"} \
  tests/gpu/test_one_gpu.py tests/gpu/test_one_gpu_pairs.py tests/gpu/test_one_gpu_gemm.py \
  tests/gpu/test_gpu_attention.py
together() {  # together NAME TEST: tests of several processes; more than the processes may take
  step "$1" 45 env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$untuned" \
    "$python" -m pytest -v tests/gpu/test_gpu_processes.py -k "$2"
}
together "a process that does not call" "does_not_call"
together "4 by IPC" "4-cuda_ipc"
together "attention in parts" "parts_of_heads"
together "4 by NVSHMEM" "4-nvshmem"
together "4 by put and get" "put_and_get and 4"

# ---- What may take all the rest of the time.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in memcheck racecheck; do
  step $tool 20 "$sanitizer" --tool $tool --error-exitcode 3 "$kernels" one-launch 2
  step "$tool of attention" 20 "$sanitizer" --tool $tool --error-exitcode 3 "$kernels" attention 1
done

say_left_out() {
  local names
  names=$(printf '%s, ' ${left_out[@]+"${left_out[@]}"})
  names=${names%, }
  echo "left out of $budget s: ${names:-nothing}"
}
if [ "$mode" = dry ]; then
  failed=$(awk -F'\t' '$2 != 0 && $2 != "left out" && $2 != "one GPU" { print $1 }' "$steps" | paste -sd, -)
  rm -f "$report" "$steps"
  echo "cannot run: ${failed:-nothing}"
  say_left_out
  [ -z "$failed" ]
  exit
fi
say_left_out | tee -a "$report"
rm -f "$out/configure.log"

"$python" - "$out" <<'PYTHON'
"""Puts the steps and their results into one file."""
import datetime, json, pathlib, subprocess, sys
from importlib import metadata

out = pathlib.Path(sys.argv[1])
steps = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()]
query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
try:
    gpu = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
except OSError:
    gpu = "none"
named = ((d.metadata["Name"] or "", d.version) for d in metadata.distributions())
report = {
    "date": datetime.date.today().isoformat(),
    "gpu": gpu,
    "versions": {n: v for n, v in sorted(named) if n.startswith(("jax", "nvidia-")) or n == "numpy"},
    "steps": [{"step": n, "status": s, "seconds": int(t)} for n, s, t in steps],
}
for name in (
    *("kernels", "between_gpus", "bandwidth", "small_calls"),
    *("blocks_beside_gemm", "gemm", "profile_beside_gemm", "attention"),
):
    path = out / f"{name}.json"
    if path.is_file():
        report[name] = json.loads(path.read_text())
        path.unlink()
(out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
(out / "steps.tsv").unlink()
failed = [n for n, s, _ in steps if s not in ("0", "left out", "one GPU")]
print("failed:", ", ".join(failed) if failed else "nothing")
sys.exit(bool(failed))
PYTHON
