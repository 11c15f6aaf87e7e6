#!/bin/bash
# A corpus prepared by an array of jobs:  bash examples/cluster/slurm_prepare.sh TEXTS OUT TOKENIZER
# A job that was killed is started again by its --requeue; what it had finished stays. `sbatch` this array a second time if jobs failed:
# it does what is missing. The last job checks every shard and names the units that are not done.
set -euo pipefail

TEXTS=${1:?folder of texts}
OUT=${2:?folder for the shards, on a disk that all machines see}
TOKENIZER=${3:?tokenizer.json}
JOBS=${JOBS:-64}
LIMITS=(--nodes=1 --ntasks=1 --cpus-per-task=1 --mem=4G --time=12:00:00)

electra prepare-plan "$OUT" "$TEXTS" --tokenizer "$TOKENIZER" --unit-bytes 67108864
ARRAY=$(sbatch --parsable --requeue --array=0-$((JOBS - 1)) --job-name=electra-unit "${LIMITS[@]}" \
    --wrap "electra prepare-unit '$OUT' --index \$SLURM_ARRAY_TASK_ID/$JOBS")
sbatch --dependency="afterok:$ARRAY" --job-name=electra-finish "${LIMITS[@]}" \
    --wrap "electra prepare-finish '$OUT'"
