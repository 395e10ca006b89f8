#!/usr/bin/env bash
# Everything that one GPU can tell, in one go: gpu_report.sh [FOLDER]. Builds from this tree without
# network and for this GPU only, tests, measures, sanitizes. Every step has a time limit, later ones
# run also when one fails; 9 minutes in all.
#
# FOLDER is where report.txt (all output, as it comes) and report.json go, and is made if it is not
# there: `benchmarks/gpu_report.sh /mnt/results`; by default benchmarks/results/gpu. PYTHON names an
# interpreter with jax, its CUDA plugin, nanobind, pytest, hypothesis, cmake and ninja; where it has
# pytest-xdist and the GPU 120 GB, tests of one GPU run six at a time.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD:-build/gpu_report}
end=$((SECONDS + 515))
report=$out/report.txt
steps=$out/steps.tsv
: >"$report"
: >"$steps"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 JAX_CP_DISPATCH_REQUIRE_GPU=1
command -v nvcc >/dev/null || export PATH=$PATH:/usr/local/cuda/bin

step() {  # step NAME SECONDS COMMAND...: runs it, and notes how it went
  local name=$1 limit=$2 began=$SECONDS status left=$((end - SECONDS))
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  echo "== $name" | tee -a "$report"
  if [ "$limit" -le 0 ]; then
    status=skipped
  else
    # Interrupted, not terminated: pytest then tells what has failed so far.
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$report" | tail -n 60
    status=${PIPESTATUS[0]}
  fi
  echo "-- $name: status $status after $((SECONDS - began)) s" | tee -a "$report"
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" >>"$steps"
}

architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
step machine 20 bash -c 'nvidia-smi; nvcc --version; '"$python"' -m pip list 2>/dev/null |
  grep -iE "jax|nvidia|nanobind|numpy|pytest"'
ARCHITECTURES=${architecture:-90}-real step build 150 csrc/cuda/build.sh "$python" "$build" install
step "build tests" 50 bash -c "cmake -S . -B '$build' -DCPD_BUILD_TESTS=ON >/dev/null &&
  cmake --build '$build' --target test_kernels"
kernels=$build/test_kernels
step "kernels" 25 "$kernels" 50

# These limits and those of the measurements add up to the whole time.
untuned="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"  # tests are small and many
at_once=(XLA_PYTHON_CLIENT_MEM_FRACTION=.75)
workers=()
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
if [ "${memory:-0}" -ge 120000 ] && "$python" -c 'import xdist' 2>/dev/null; then
  at_once=(XLA_PYTHON_CLIENT_MEM_FRACTION=.12)  # of each; the rest is for channels
  workers=(-n 6)
fi
step "one GPU" 120 env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$untuned" "${at_once[@]}" \
  "$python" -m pytest -q ${workers[@]+"${workers[@]}"} \
  tests/gpu/test_one_gpu_gemm.py tests/gpu/test_one_gpu.py tests/gpu/test_gpu_attention.py
step "gemm" 60 env JAX_PLATFORMS=cuda XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" \
  "$python" benchmarks/gpu_gemm.py --repeats 3 --output "$out/gemm.json"
step "bandwidth" 45 env JAX_PLATFORMS=cuda "$python" benchmarks/gpu_exchange.py \
  --repeats 5 --output "$out/bandwidth.json"
step "attention rate" 45 env JAX_PLATFORMS=cuda "$python" benchmarks/gpu_attention.py \
  --documents 8192 1000 --repeats 3 --output "$out/attention.json"
step "processes" 100 env JAX_PLATFORMS=cuda,cpu XLA_FLAGS="$untuned" \
  "$python" -m pytest -v tests/gpu/test_gpu_processes.py
step "one process" 30 env JAX_PLATFORMS=cuda "$python" benchmarks/multi_gpu.py --small \
  --repeats 3 --output "$out/one_process.json"
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
step "memcheck" 30 "$sanitizer" --tool memcheck --error-exitcode 3 "$kernels" 3
step "racecheck" 30 "$sanitizer" --tool racecheck --error-exitcode 3 "$kernels" 3

"$python" - "$out" <<'PYTHON'
"""Puts the steps and their results into one file."""
import datetime, json, pathlib, subprocess, sys

out = pathlib.Path(sys.argv[1])
steps = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()]
query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
try:
    gpu = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
except OSError:
    gpu = "none"
report = {
    "date": datetime.date.today().isoformat(),
    "gpu": gpu,
    "steps": [{"step": n, "status": s, "seconds": int(t)} for n, s, t in steps],
}
for name in ("bandwidth", "attention", "gemm", "one_process"):
    path = out / f"{name}.json"
    if path.is_file():
        report[name] = json.loads(path.read_text())
        path.unlink()
(out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
(out / "steps.tsv").unlink()
failed = [n for n, s, _ in steps if s != "0"]
print("failed:", ", ".join(failed) if failed else "nothing")
sys.exit(bool(failed))
PYTHON
