#!/bin/bash
#SBATCH --job-name=example
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --time=240
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/lustre/me/project/runs/example.jobs/0001/log.txt
#SBATCH --chdir=/lustre/me/project
#SBATCH --partition=batch
#SBATCH --account=research

set -uo pipefail
spec=/lustre/me/project/runs/example.jobs/0001/spec.yaml
failures=/lustre/me/project/runs/example.jobs/0001/failures
stop=/lustre/me/project/runs/example.jobs/0001/stop
cancelled=/lustre/me/project/runs/example.jobs/0001/cancelled
rm -f "$stop"

# Slurm itself starts a job again that it preempts, or whose host fails, while it is being cancelled.
[[ -e $cancelled ]] && exit 75

# A signal to the step may reach every process in it; the file reaches the driver alone, which saves.
trap 'touch "$stop"' USR1
srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
  --container-image=nvcr.io/nvidia/nemo:25.07 \
  --container-mounts=/lustre/data:/data:ro,/lustre/me/project:/lustre/me/project,/lustre/me/project/runs/example.jobs:/lustre/me/project/runs/example.jobs,/lustre/me/project/runs:/lustre/me/project/runs \
  --no-container-mount-home \
  --container-workdir=/lustre/me/project \
  nrl node "$spec" --stop-file "$stop" &
step=$!

while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# 75: it saved because it was told to. 2: the spec or an input is wrong, so another start would end the same way.
if [[ -e $cancelled || $code == 0 || $code == 2 ]]; then
  exit "$code"
fi
if [[ $code != 75 ]]; then
  printf x >>"$failures"
  if [[ $(wc -c <"$failures") -gt 3 ]]; then
    exit "$code"
  fi
fi
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
