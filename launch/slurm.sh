#!/bin/bash
# Trains over all GPUs of a Slurm job, one process for each:
#
#     sbatch launch/slurm.sh configs/NAME.py --run_dir runs/NAME [--section.field VALUE ...]
#
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

config=${1:?name a config file}
shift
# Where one process fails, the others are ended too.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" train.py "$config" \
    --distributed.detect True --mesh.data "$SLURM_NTASKS" "$@"
code=$?
# After SIGTERM, 300 seconds before the time is up, the run is saved: the same job goes on with it.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
