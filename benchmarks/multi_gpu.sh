#!/usr/bin/env bash
# One process per GPU, then one table: multi_gpu.sh [options of multi_gpu.py].
#   on one host             benchmarks/multi_gpu.sh --output report.json
#   with Slurm              srun --ntasks-per-node=8 --gpus-per-task=1 benchmarks/multi_gpu.sh ...
#   on two hosts            HOSTS=2 HOST=0 COORDINATOR_ADDRESS=host0:12355 benchmarks/multi_gpu.sh ...
#                           HOSTS=2 HOST=1 COORDINATOR_ADDRESS=host0:12355 benchmarks/multi_gpu.sh ...
#   without GPUs            PROCESSES=2 JAX_PLATFORMS=cpu benchmarks/multi_gpu.sh --small
# PROCESSES is the number of processes on this host, by default its GPUs. Between hosts rows go over
# the network that NVSHMEM finds (compiled, not run); the first line says which processes reach each
# other how. Without InfiniBand XLA's collectives serve; docs/gpu.md tells of other networks.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if [ -n "${SLURM_PROCID:-}" ]; then
  exec "$python" "$here/multi_gpu.py" --distributed "$@"
fi
processes=${PROCESSES:-$(nvidia-smi -L | wc -l)}
hosts=${HOSTS:-1} host=${HOST:-0}
export COORDINATOR_ADDRESS=${COORDINATOR_ADDRESS:-127.0.0.1:12355}
export NUM_PROCESSES=$((hosts * processes))
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for ((i = 0; i < processes; ++i)); do
  PROCESS_ID=$((host * processes + i)) CUDA_VISIBLE_DEVICES=$i \
    "$python" "$here/multi_gpu.py" --distributed "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
trap - EXIT
exit "$status"
