#!/bin/bash

#SBATCH --job-name=mpo
#SBATCH --ntasks=32
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:1
#SBATCH --output=slurm_logs/mpo_%j.txt
#SBATCH --error=slurm_errors/mpo_%j.txt

current_commit=$(git rev-parse --short HEAD)
export PYTHONPATH=$(dirname "$(dirname "$PWD")")
if python "$PYTHONPATH/sota-implementations/mpo/mpo.py" \
  logger.backend=wandb \
  logger.project_name="torchrl-example-check-$current_commit" \
  logger.group_name=mpo
then
  outcome=success
else
  outcome=error
fi
echo "mpo_${SLURM_JOB_ID}=$outcome" >> report.log
