#!/bin/bash

#SBATCH --job-name=vmpo
#SBATCH --ntasks=32
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:1
#SBATCH --output=slurm_logs/vmpo_%j.txt
#SBATCH --error=slurm_errors/vmpo_%j.txt

current_commit=$(git rev-parse --short HEAD)
export PYTHONPATH=$(dirname "$(dirname "$PWD")")
if python "$PYTHONPATH/sota-implementations/vmpo/vmpo.py" \
  logger.backend=wandb \
  logger.project_name="torchrl-example-check-$current_commit" \
  logger.group_name=vmpo
then
  outcome=success
else
  outcome=error
fi
echo "vmpo_${SLURM_JOB_ID}=$outcome" >> report.log
