#!/bin/bash
# Trains over all GPUs of a Slurm job, one process for each:
#
#     sbatch launch/slurm.sh NAME --run_dir runs/NAME [--section.field VALUE ...]
#
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

config=${1:?name a config}
shift
# About 2 % faster on an H200: docs/measurements/performance.md.
export XLA_FLAGS="--xla_gpu_enable_triton_gemm=false ${XLA_FLAGS-}"
# If one process fails, srun ends the others.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" train.py "$config" \
    --distributed.detect True --mesh.data "$SLURM_NTASKS" "$@"
code=$?
# Slurm sends SIGTERM 300 seconds before the time limit; the run saves and the job is queued again.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
