#!/usr/bin/env bash
# The benchmark of several GPUs: multi_gpu.sh [--sizes full | quick | tiny] [--transport NAME]
#                                             --output report.json
#   on one host          benchmarks/multi_gpu.sh --output report.json
#   with Slurm           srun --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none \
#                          benchmarks/multi_gpu.sh --output report.json
#   on two hosts         HOSTS=2 HOST=0 COORDINATOR=host0 benchmarks/multi_gpu.sh --output ...
#                        HOSTS=2 HOST=1 COORDINATOR=host0 benchmarks/multi_gpu.sh --output ...
#   in one process       PROCESSES=1 benchmarks/multi_gpu.sh --output report.json
#   without GPUs         PROCESSES=2 JAX_PLATFORMS=cpu benchmarks/multi_gpu.sh --sizes tiny
# Starts one process per GPU, anew for each section (SECTIONS, a regular expression, chooses), and
# ends them after LIMIT seconds. The first sections are the gate, a check of results, without
# CUDA_DEVICE_MAX_CONNECTIONS and with 1; if one of them does not pass, nothing is measured. The
# gate requires a transport of this package, or the one that --transport names. The file is written
# after each section; each says before it starts how much memory it needs. The status is 0; 124 if
# sections ran out of time, and none failed; otherwise 1 or 2.
#
# All GPUs must be visible to each process: with Slurm, --gpus-per-task would hide them from each
# other. CUDA_VISIBLE_DEVICES stays as it is; a GPU that it shows and no process uses is an error.
# PROCESSES is the number of processes on this host, by default the GPUs that CUDA finds; PORT is
# the first of the ports of the coordinator. In a step of Slurm with one task, as `srun --pty bash`,
# the script starts the processes itself.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
program=$here/multi_gpu.py
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
limit=${LIMIT:-1800}
# A missing rank is named before the limit, also at a first call, which has three deadlines.
export JAX_CP_DISPATCH_DEADLINE=${JAX_CP_DISPATCH_DEADLINE:-$(((limit + 3) / 4))}
port=${PORT:-12355} hosts=${HOSTS:-1} host=${HOST:-0}
in_slurm=
[ -z "${SLURM_STEP_NODELIST:-}" ] || [ "${SLURM_NTASKS:-1}" -le 1 ] || in_slurm=yes
[ -n "$in_slurm" ] || unset SLURM_STEP_NODELIST  # by which JAX would find a job of Slurm
if [ -n "$in_slurm" ] && [ -n "${PROCESSES:-}" ]; then
  echo "multi_gpu.sh: srun has started $SLURM_NTASKS tasks, one for each process. Unset PROCESSES." >&2
  exit 2
fi
mapfile -t runs < <("$python" "$program" --list "$@")
if [ "${#runs[@]}" = 0 ]; then exit 2; fi

processes=1
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

one() {  # one PROCESS SECTIONS ...: becomes a process of this host
  local index=$1 sections=$2
  shift 2
  if [ -z "$in_slurm" ] && [ $((hosts * processes)) -gt 1 ]; then
    export JAX_COORDINATOR_ADDRESS=${COORDINATOR:-127.0.0.1}:$port NUM_PROCESSES=$((hosts * processes))
    export PROCESS_ID=$((host * processes + index))
    [ "${JAX_PLATFORMS:-}" = cpu ] || export JAX_LOCAL_DEVICE_IDS=$index
  fi
  exec timeout --kill-after=10 "$limit" "$python" "$program" --sections "$sections" "$@"
}

declare -A pids=()
end() {  # ends the processes: each `timeout` has a group of its own, which no signal to this one reaches
  trap '' INT TERM
  [ "${#pids[@]}" = 0 ] || { kill "${!pids[@]}"; wait "${!pids[@]}"; } 2>/dev/null
  exit "$1"
}
trap 'end 130' INT
trap 'end 143' TERM

measure() {  # measure SECTIONS ...: all processes of this host; the first failure ends the others
  local index status=0 code ended ending=
  pids=()
  for ((index = 0; index < processes; ++index)); do
    (trap - INT TERM; one "$index" "$@") &
    pids[$!]=yes
  done
  while [ "${#pids[@]}" -gt 0 ]; do
    wait -n -p ended "${!pids[@]}"
    code=$?
    unset "pids[$ended]"
    if [ "$code" != 0 ] && [ "$status" = 0 ]; then
      status=$code
      [ "${#pids[@]}" = 0 ] || { sleep 20; kill "${!pids[@]}"; } >/dev/null 2>&1 &
      ending=$!
    fi
  done
  [ -z "$ending" ] || kill "$ending" 2>/dev/null
  return "$status"
}

status=0
for sections in "${runs[@]}"; do
  port=$((port + 1))
  export JAX_COORDINATOR_PORT=$port  # for Slurm: an earlier section may not have left its port yet
  [[ -z ${SECTIONS:-} || $sections =~ $SECTIONS ]] || continue
  began=$SECONDS
  measure "$sections" "$@"
  code=$?
  [ "$code" != 0 ] || continue
  how=failed
  # 137: killed, because it did not end itself.
  if [ "$code" = 124 ] || { [ "$code" = 137 ] && [ $((SECONDS - began)) -ge "$limit" ]; }; then
    how="ran out of time (LIMIT=$limit)"
    [ "$status" != 0 ] || status=124
  else
    status=1
  fi
  echo "multi_gpu.sh: $sections $how" >&2
  if [[ $sections == gate* ]]; then
    echo "multi_gpu.sh: results are wrong or missing; nothing is measured" >&2
    break
  fi
done
exit "$status"
