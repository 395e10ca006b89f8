#!/usr/bin/env bash
# The benchmark of several GPUs: multi_gpu.sh [--sizes full | quick | tiny] --output report.json
#   on one host          benchmarks/multi_gpu.sh --output report.json
#   with Slurm           srun --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none \
#                          benchmarks/multi_gpu.sh --output report.json
#   on two hosts         HOSTS=2 HOST=0 COORDINATOR=host0 benchmarks/multi_gpu.sh --output ...
#                        HOSTS=2 HOST=1 COORDINATOR=host0 benchmarks/multi_gpu.sh --output ...
#   in one process       PROCESSES=1 benchmarks/multi_gpu.sh --output report.json
#   without GPUs         PROCESSES=2 JAX_PLATFORMS=cpu benchmarks/multi_gpu.sh --sizes tiny
# Starts one process per GPU, anew for each section (SECTIONS, a regular expression, chooses), and
# ends them after LIMIT seconds. If the first section, a check of results, fails, no other runs.
# The file is written after each section; each says before it starts how much memory it needs.
#
# All GPUs must be visible to each process: with Slurm, --gpus-per-task would hide them from each
# other. CUDA_VISIBLE_DEVICES stays as it is. PROCESSES is the number of processes on this host, by
# default the GPUs that CUDA finds; PORT is the first of the ports of the coordinator.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
program=$here/multi_gpu.py
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
limit=${LIMIT:-1800} port=${PORT:-12355} hosts=${HOSTS:-1} host=${HOST:-0}
in_slurm=${SLURM_STEP_NODELIST:+yes}
mapfile -t runs < <("$python" "$program" --list "$@")
if [ "${#runs[@]}" = 0 ]; then exit 2; fi

if [ -z "$in_slurm" ]; then
  processes=${PROCESSES:-$("$python" -c 'from jax_cp_dispatch._ranks import runtime
print(runtime.cuda.device_count()[0] if runtime.cuda else 0)')}
  if [ "${processes:-0}" -lt 1 ]; then
    echo "multi_gpu.sh: CUDA finds no GPU, or the package was built without CUDA. Set PROCESSES." >&2
    exit 2
  fi
  echo "multi_gpu.sh: $((hosts * processes)) processes on $hosts hosts; sections: $(IFS=,; echo "${runs[*]}");" \
    "each at most $limit s"
fi

one() {  # one PROCESS SECTIONS ...: a process of this host
  local index=$1 sections=$2
  shift 2
  if [ -z "$in_slurm" ] && [ $((hosts * processes)) -gt 1 ]; then
    export JAX_COORDINATOR_ADDRESS=${COORDINATOR:-127.0.0.1}:$port NUM_PROCESSES=$((hosts * processes))
    export PROCESS_ID=$((host * processes + index))
    [ "${JAX_PLATFORMS:-}" = cpu ] || export JAX_LOCAL_DEVICE_IDS=$index
  fi
  exec timeout --kill-after=10 "$limit" "$python" "$program" --sections "$sections" "$@"
}

measure() {  # measure SECTIONS ...: all processes of this host; the first failure ends the others
  local index status=0 ended pids=()
  if [ -n "$in_slurm" ]; then
    (one 0 "$@")
    return
  fi
  for ((index = 0; index < processes; ++index)); do
    (one "$index" "$@") &
    pids[$!]=$!
  done
  while [ "${#pids[@]}" -gt 0 ]; do
    wait -n -p ended "${pids[@]}" || {
      { [ "$status" != 0 ] || { sleep 20; kill "${pids[@]}"; }; } >/dev/null 2>&1 &
      status=1
    }
    unset "pids[$ended]"
  done
  return "$status"
}

status=0
for sections in "${runs[@]}"; do
  port=$((port + 1))
  export JAX_COORDINATOR_PORT=$port  # for Slurm: an earlier section may not have left its port yet
  [[ -z ${SECTIONS:-} || $sections =~ $SECTIONS ]] || continue
  measure "$sections" "$@" && continue
  status=1
  if [ "$sections" = gate ]; then
    echo "multi_gpu.sh: results are wrong or missing; nothing is measured" >&2
    break
  fi
done
exit "$status"
