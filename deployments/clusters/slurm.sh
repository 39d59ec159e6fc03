#!/bin/bash
# A run on two hosts with 8 GPUs each under SLURM (docs/how-to/several-hosts.md). It has not been run on such a cluster.
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00
. /shared/rlhf/environment.sh      # the exports of docs/how-to/several-hosts.md, and the virtual environment
head=$(hostname -I | cut -d' ' -f1)
dask scheduler --host "$head" --port 8786 --protocol tls --no-dashboard &
dask worker "tls://$head:8786" --host "$head" --nthreads 1 --memory-limit 0 --no-dashboard \
    --name controller --resources controller=1 &
srun --kill-on-bad-exit=0 bash -c '
  export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
  while true; do
    dask worker "tls://'"$head"':8786" --nthreads 1 --memory-limit 0 --no-dashboard \
        --name "rank-$SLURM_PROCID" --resources GPU=1
    sleep 5
  done' &
prefect-rlhf run ppo --config /shared/rlhf/ppo.yaml name=nightly \
    cluster.address="tls://$head:8786" cluster.n_hosts=2 cluster.devices_per_host=8
