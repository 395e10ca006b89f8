#!/usr/bin/env bash
# Everything that the GPUs of this host can tell: gpu_report.sh [--budget SECONDS] [FOLDER].
# Builds from this tree without network and for this GPU only, tests and measures. The steps come in
# the order of their worth, and later ones run also when one fails. Each has a time limit of its own,
# and at most what is left of the budget (540 s; with several GPUs 3600 s). The last lines say what
# failed, what ran out of time, and what was left out. STEPS, a regular expression, chooses among
# them: `STEPS='gemm|bandwidth' gpu_report.sh` repeats two. The status is 1 if a step failed, 3 if
# none did, but one ran out of time, and 2 if this machine lacks what a step needs.
#
# Steps on one GPU see the first of those that CUDA_VISIBLE_DEVICES shows, and run with
# CUDA_DEVICE_MAX_CONNECTIONS=32 if the ranks of a program each have streams on it. All others run
# without this variable, unless their name says otherwise.
#
# FOLDER is where report.txt (all output, as it comes) and report.json go, and is made if it is not
# there: `benchmarks/gpu_report.sh /mnt/results`; by default benchmarks/results/gpu. PYTHON names an
# interpreter with jax, its CUDA plugin, nanobind, pytest, hypothesis, cmake and ninja; where it has
# pytest-xdist, several tests of one GPU run at a time.
#
# GIVEN names a folder with extensions and test_kernels of this tree, built elsewhere by this script
# (`ARCHITECTURE=90 gpu_report.sh --build-only FOLDER`). They are used if their stamp (sources, GPU,
# Python, versions of XLA's FFI and of NVSHMEM) is that of this machine, and if the package imports
# with them; otherwise everything is built here.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
mode=run
budget=
while [[ ${1:-} == -* ]]; do
  case "$1" in
    --build-only) mode=build ;;
    --budget) budget=${2:-none}; shift ;;
    *) budget=none ;;
  esac
  [[ ${budget:-1} =~ ^[1-9][0-9]*$ ]] || {
    echo "usage: gpu_report.sh [--build-only] [--budget SECONDS] [FOLDER]" >&2
    exit 2
  }
  shift
done
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD:-build/gpu_report}
given=${GIVEN:-build/given}
all_gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --list-gpus 2>/dev/null |
  sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)}
several=
[[ $all_gpus != *,* ]] || several=yes
[ -n "$budget" ] || budget=$([ -n "$several" ] && echo 3600 || echo 540)
end=$((budget - (budget > 100 ? 10 : 1)))  # seconds; the rest is for what follows the steps
left_out=()
shortest=5  # seconds with which a step is begun
report=$out/report.txt
steps=$out/steps.tsv
: >"$report"
: >"$steps"
[ "$mode" = build ] || "$python" benchmarks/gpu_machine.py found | tee -a "$report"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 JAX_CP_DISPATCH_REQUIRE_GPU=1
deadline=${JAX_CP_DISPATCH_DEADLINE:-}  # of the user; by default a quarter of a step's limit
export JAX_CP_DISPATCH_TEST_LIMIT=40   # seconds of a test
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$root/build/gpu_report_cache}
command -v nvcc >/dev/null || export PATH=$PATH:/usr/local/cuda/bin
queues=CUDA_DEVICE_MAX_CONNECTIONS  # hardware queues
many_queues=$queues=32              # one GPU holds the streams of many ranks
unset $queues
[ -z "$several" ] || export CUDA_VISIBLE_DEVICES=${all_gpus%%,*}

is_chosen() {  # is_chosen NAME: the machine and the builds always are
  case "$1" in machine | build | import | "build nvshmem") return 0 ;; esac
  [ -z "${STEPS:-}" ] || [[ $1 =~ $STEPS ]]
}

step() {  # step NAME SECONDS COMMAND...: runs it, and notes how it went
  local name=$1 limit=$2 began=$SECONDS left=$((end - SECONDS))
  shift 2
  is_chosen "$name" || return 1
  if [ "$left" -lt "$((limit < shortest ? limit : shortest))" ]; then
    left_out+=("$name")
    printf '%s\tleft out\t0\n' "$name" >>"$steps"
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  echo "== $name: from $began s on, at most $limit s" | tee -a "$report"
  start "$limit" "$out/step.log" "$@"
  # Not a pipe, which would stay open for what a step leaves behind.
  tail --lines=+1 --follow --sleep-interval=.1 --pid="$started" "$out/step.log" |
    tee -a "$report" &
  finish "$started"
  wait "$!"
  note "$name" "$((SECONDS - began))" "$limit" "$out/step.log"
}

declare -A running=()
start() {  # start LIMIT LOG COMMAND...: runs it, in the process `started`
  local limit=$1 log=$2
  shift 2
  : >"$log"
  # Interrupted, not terminated: pytest then tells what has failed so far. Processes that a test
  # starts end before, so that it tells what they have said. A missing rank is named before, also at
  # a first call, which has three deadlines.
  JAX_CP_DISPATCH_PROCESS_LIMIT=$((limit > 20 ? limit - 10 : limit)) \
    JAX_CP_DISPATCH_DEADLINE=${deadline:-$(((limit + 3) / 4))} \
    timeout --signal=INT --kill-after=5 "$limit" "$@" >"$log" 2>&1 &
  started=$!
  running[$started]=yes
}

finish() {  # finish PROCESS: waits for it; its status is in `finished`
  while
    wait "$1"
    finished=$?
    [ "$finished" -gt 128 ] && kill -0 "$1" 2>/dev/null
  do :; done  # a signal ends `wait`
  unset "running[$1]"
}

# An interruption ends what runs, and leaves out the rest: the report is written.
trap 'end=0; [ "${#running[@]}" = 0 ] || kill -s INT "${!running[@]}"' INT TERM

note() {  # note NAME SECONDS LIMIT LOG: how the step went that has `finished`; fails if it failed
  local status=$finished
  if [ "$status" != 0 ]; then
    # 137: killed. A test says "not over after" of processes that it has ended.
    if [ "$status" = 124 ] || { [ "$status" = 137 ] && [ "$2" -ge "$3" ]; } ||
      grep -q "not over after" "$4"; then
      status="out of time"
    elif grep -q ERR_NVGPUCTRPERM "$4"; then
      status="not permitted"
      echo "$1: only root may read the counters of this GPU: run as root, or load the driver with" \
        "NVreg_RestrictProfilingToAdminUsers=0" | tee -a "$report"
    fi
  fi
  rm -f "$4"
  echo "-- $1: status $status after $2 s" | tee -a "$report"
  printf '%s\t%s\t%s\n' "$1" "$status" "$2" >>"$steps"
  [ "$status" = 0 ]
}

. benchmarks/gpu_build.sh
export -f configure build_first build_nvshmem import_package
export build out python

architecture=${ARCHITECTURE:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
  head -1 | tr -d .)}
export architecture=${architecture:-90}

needs=(run)
[ -n "${STEPS:-}" ] || needs+=(test)
[ "$mode" != build ] || needs=()
[ "$mode" != build ] && is_given >/dev/null 2>&1 || needs+=(build)
if ! ARCHITECTURE=$architecture "$python" benchmarks/gpu_machine.py lacks "${needs[@]}" |
  tee -a "$report"; then
  rm -f "$steps"
  exit 2
fi

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
if is_chosen warm-up && [ "$end" -gt 100 ]; then
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
if is_given | tee -a "$report" &&
  install "$given" _cpu _cuda _nvshmem && step import 20 bash -c import_package; then
  kernels=$given/test_kernels
else
  step build 120 bash -c build_first && install "$build" _cpu _cuda
  step import 20 bash -c import_package
fi
[ -z "$warming" ] || step warm-up 90 bash -c 'await "$warming" "$out/warm_up.log"'
rm -f "$out/warm_up.log"

# ---- The kernels without JAX.
step kernels 15 env $many_queues "$kernels" 20
step "kernel times" 25 env $many_queues "$kernels" time "$out/kernels.json"

# NVSHMEM apart: it takes longer to build, and everything else works without it.
nvshmem=
for step in "smoke: nvshmem" "smoke: put" "4 by NVSHMEM" "4 by put and get"; do
  ! is_chosen "$step" || needs_nvshmem=1
done
if [ "$kernels" = "$build/test_kernels" ] && [ -n "${needs_nvshmem:-}" ]; then
  { nice bash -c build_nvshmem; echo "build: status $?"; } >"$out/nvshmem.log" 2>&1 &
  nvshmem=$!
fi
export nvshmem

# ---- The smoke table: each line its own process, up to three at a time.
smoke_line() {  # smoke_line LINE: tests of one operation
  local id queues=()
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
  [[ $id == *processes* ]] || queues=($many_queues)
  env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$untuned" ${queues[@]+"${queues[@]}"} \
    XLA_PYTHON_CLIENT_MEM_FRACTION=.2 "$python" -m pytest -q "tests/gpu/$id"
}
export -f smoke_line
export untuned many_queues

smoke() {  # smoke SECONDS LINE...: these lines at a time
  local limit=$1 began=$SECONDS left=$((end - SECONDS)) line lines=() job jobs=()
  shift
  for line; do ! is_chosen "smoke: $line" || lines+=("$line"); done
  if [ "$left" -lt "$shortest" ]; then
    for line in ${lines[@]+"${lines[@]}"}; do step "smoke: $line" "$limit"; done
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  for line in ${lines[@]+"${lines[@]}"}; do
    echo "== smoke: $line: from $began s on, at most $limit s" | tee -a "$report"
    start "$limit" "$out/smoke.$line" bash -c 'smoke_line "$1"' - "$line"
    jobs[$started]=$line
  done
  for job in ${jobs[@]+"${!jobs[@]}"}; do
    finish "$job"
    tee -a "$report" <"$out/smoke.${jobs[$job]}"
    note "smoke: ${jobs[$job]}" "$((SECONDS - began))" "$limit" "$out/smoke.${jobs[$job]}"
  done
}
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

# ---- Between GPUs: what they compute, then how fast. The gate of `rates` runs with one hardware
# queue and with as many as CUDA makes. One process with all GPUs comes last: it can stop in ways in
# which several cannot.
between() {  # between NAME SECONDS COMMAND...
  step "between GPUs: $1" "$2" env CUDA_VISIBLE_DEVICES="$all_gpus" \
    JAX_PLATFORMS=cuda,cpu JAX_CP_DISPATCH_TEST_LIMIT=0 "${@:3}"
}
of_all_gpus() {  # of_all_gpus CASE: what the test says so far is printed when its time is over
  between "$1" 600 XLA_FLAGS="$untuned" "$python" -m pytest -q \
    "tests/gpu/test_gpu_processes.py::test_every_operation[$1]"
}
if [ -n "$several" ]; then
  for case in cuda_ipc nvshmem "put and get"; do of_all_gpus "$case"; done
  between rates 900 LIMIT=300 JAX_CP_DISPATCH_DEADLINE="$deadline" PYTHON="$python" \
    benchmarks/multi_gpu.sh --sizes quick --output "$out/between_gpus.json"
  of_all_gpus "one process"
elif is_chosen "between GPUs"; then
  echo "between GPUs: one GPU" | tee -a "$report"
  printf 'between GPUs\tone GPU\t0\n' >>"$steps"
fi

# ---- Measurements.
no_buffers="$measured --xla_gpu_enable_command_buffer="  # their kernels have no streams in a profile
ncu=$(command -v ncu || echo /usr/local/cuda/bin/ncu)
[ -x "$ncu" ] || echo "no ncu: no profile, and no L2 cache in attention" | tee -a "$report"
step bandwidth 30 env JAX_PLATFORMS=cuda "$python" benchmarks/gpu_exchange.py \
  --repeats 3 --output "$out/bandwidth.json"
step "small calls" 20 env $many_queues "$kernels" small "$out/small_calls.json"
step gemm 60 env JAX_PLATFORMS=cuda XLA_FLAGS="$no_buffers" $many_queues \
  "$python" benchmarks/gpu_gemm.py --repeats 3 --output "$out/gemm.json"
step "attention rate" 120 env JAX_PLATFORMS=cuda XLA_FLAGS="$measured" "$python" \
  benchmarks/gpu_attention.py --output "$out/attention.json"
if [ -x "$ncu" ]; then
  step profile 40 env $many_queues "$ncu" --clock-control none --kernel-name 'regex:Push|Unpack|Pull' --metrics \
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
step "one GPU" 100 env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$recorded" $many_queues "${at_once[@]}" \
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

# ---- What only a device can tell of questions that are open; each step is chosen by "open:".
libraries=$("$python" -c 'import nvidia
print(*(f"{at}/cu13/lib:{at}/cublas/lib" for at in nvidia.__path__), sep=":")' 2>/dev/null)  # cuBLASLt
libraries=$libraries:/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
step "open: profile beside a GEMM" 50 env JAX_PLATFORMS=cuda XLA_FLAGS="$no_buffers" \
  "$python" benchmarks/gpu_profile.py --output "$out/profile_beside_gemm.json"
step "open: profile with one hardware queue" 50 env JAX_PLATFORMS=cuda XLA_FLAGS="$no_buffers" \
  $queues=1 "$python" benchmarks/gpu_profile.py --output "$out/profile_one_queue.json"
step "open: blocks beside a GEMM" 40 env LD_LIBRARY_PATH="$libraries" \
  "$kernels" beside "$out/blocks_beside_gemm.json"
step "open: gate" 100 env JAX_PLATFORMS=cuda PROCESSES=1 SECTIONS=gate LIMIT=50 \
  JAX_CP_DISPATCH_DEADLINE="$deadline" PYTHON="$python" \
  benchmarks/multi_gpu.sh --sizes quick --output "$out/gate.json"
under_mps() {  # under_mps WHAT TEST: everything that XLA records into CUDA graphs is recorded
  step "open: recorded $1 of two processes under MPS" 60 env JAX_PLATFORMS=cuda \
    XLA_FLAGS="$recorded" $queues=1 "$python" tests/gpu/stress_processes.py --processes 2 --test "$2"
}
under_mps GEMMs test_every_method_of_the_products
under_mps programs test_programs_without_collectives
attend_once() {  # both passes of this package's attention, one document of 8192 tokens
  "$python" - <<'PYTHON'
import sys

import jax

sys.path.append("benchmarks")
import attention_workloads as workloads
from gpu_attention import lowered

workload = workloads.documents(8192, 8192, workloads.Heads(32, 8, 128, 128))
for compile, operands in lowered("ours", workload, workload.operands()):
    jax.block_until_ready(compile()(*operands))
PYTHON
}
export -f attend_once
metrics=(lts__t_bytes.sum lts__t_bytes.sum.per_second dram__bytes.sum.per_second
  lts__throughput.avg.pct_of_peak_sustained_elapsed gpu__time_duration.sum
  sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active)
if [ -x "$ncu" ]; then
  step "open: L2 cache in attention" 80 env JAX_PLATFORMS=cuda XLA_FLAGS="$measured" \
    "$ncu" --target-processes all --clock-control none --kernel-name 'regex:Attend|Gradients' \
    --metrics "$(IFS=,; echo "${metrics[*]}")" bash -c attend_once
fi

# ---- What may take all the rest of the time.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in memcheck racecheck; do
  step $tool 20 env $many_queues "$sanitizer" --tool $tool --error-exitcode 3 "$kernels" one-launch 2
  step "$tool of attention" 20 "$sanitizer" --tool $tool --error-exitcode 3 "$kernels" attention 1
done

names=$(printf '%s, ' ${left_out[@]+"${left_out[@]}"})
names=${names%, }
echo "left out of $budget s: ${names:-nothing}" | tee -a "$report"
rm -f "$out/configure.log"
exec "$python" benchmarks/gpu_machine.py report "$out"
