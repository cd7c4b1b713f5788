#!/usr/bin/env bash
# Starts a Ray cluster on the nodes of a Slurm job, and a command on the first of them:
#
#     sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh slime-launch train --config run.toml
#
# Environment, code, models, data, --save and --output-dir must be there under the same path on every node.
#SBATCH --job-name=slime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")
address=$("${on_first[@]}" hostname --ip-address | awk '{ print $1; exit }')

# Whoever reaches the ports of Ray needs this token; Slurm hands it to every step with the environment.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN

common=(--port="$port" --disable-usage-stats --block)
if [[ -n ${SLURM_CPUS_ON_NODE:-} ]]; then
    common+=(--num-cpus="$SLURM_CPUS_ON_NODE")
fi
steps=()
trap 'kill "${steps[@]}" 2>/dev/null || true; wait' EXIT

"${on_first[@]}" ray start --head --node-ip-address="$address" --include-dashboard=false "${common[@]}" &
steps+=($!)
until "${on_first[@]}" ray health-check --address "$address:$port" >/dev/null 2>&1; do
    kill -0 "${steps[0]}" 2>/dev/null || { echo "Ray's first node did not start; see above" >&2; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start --address="$address:$port" "${common[@]:1}" &
    steps+=($!)
done

# slime waits by itself until the cluster has room for the run (--ray-placement-timeout).
RAY_ADDRESS="$address:$port" "${on_first[@]}" "$@"
