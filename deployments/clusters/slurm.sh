#!/bin/bash
# A run on the hosts of one SLURM job, with a task for each device (docs/how-to/slurm.md):
#   sbatch slurm.sh ppo --config /shared/rlhf/ppo.yaml name=nightly
# Five minutes before its time is over, or by `scancel --batch --signal=TERM JOB`, the run ends at its next commit.
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00 --signal=B:TERM@300
. "${RLHF_ENVIRONMENT:-/shared/rlhf/environment.sh}"   # the exports of docs/how-to/several-hosts.md, and the virtual environment
head=$(hostname -I | cut -d' ' -f1)
address="tls://$head:8786"
dask scheduler --host "$head" --port 8786 --protocol tls --no-dashboard &
dask worker "$address" --host "$head" --nthreads 1 --memory-limit 0 --no-dashboard \
    --name controller --resources controller=1 &
srun --kill-on-bad-exit=0 bash -c '
  # of those that SLURM gives the job: the one of this task, which may see no others
  export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLURM_LOCALID + 1)) <<< "${CUDA_VISIBLE_DEVICES:-$SLURM_LOCALID}")
  while true; do
    dask worker "'"$address"'" --nthreads 1 --memory-limit 0 --no-dashboard \
        --name "rank-$SLURM_PROCID" --resources "${RLHF_OFFERS:-GPU=1}"
    sleep 5
  done' &
prefect-rlhf run "$@" cluster.address="$address" \
    cluster.n_hosts="$SLURM_JOB_NUM_NODES" cluster.devices_per_host="$SLURM_NTASKS_PER_NODE" &
run=$!
trap 'kill $(jobs -p)' EXIT   # where SLURM tracks processes without cgroups, the scheduler would outlive the job
trap 'kill -TERM "$run"' TERM
wait "$run"; status=$?
[ "$status" -le 128 ] || { wait "$run"; status=$?; }   # a trap ends the first wait
exit "$status"
