#!/usr/bin/env bash
# Reproduction on a machine with CUDA devices, in stages that can be interrupted at any moment: run the
# same command again to continue; finished cells are not repeated. From the root of the repository:
#
#   DATA=/data profiling/reproduce_cuda.sh                # every stage
#   DATA=/data profiling/reproduce_cuda.sh listops text   # some stages
#
# DATA     folder of the releases (ListOps is generated); a stage without its data names the missing files
# JOBS     cells run at a time (default 4: these models are too small to fill a GPU)
# DEVICES  CUDA devices that the jobs take in turn, such as 0,1,2,3 (default: the first)
# SEEDS    seeds (default: the five of each table)
# RUNS     folder of the runs (default runs)
# PYTHON   default .venv/bin/python
# Array jobs: SHARD=0/8 … 7/8, then once without SHARD to write the reports.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
JOBS=${JOBS:-4}
RUNS=${RUNS:-runs}
MONTH=$(date +%Y%m)
HALF="--trainer configs/trainer/one_gpu.yaml"
FAILED=()

reproduce() { # name of the report, then the command's arguments
    local name=$1
    shift
    echo "== $name"
    "$PYTHON" -m lit_probattn.reproduce "$@" --accelerator gpu --jobs "$JOBS" --runs "$RUNS" \
        --out "reports/reproduce_${name}_cuda_$MONTH" ${DATA:+--data_dir "$DATA"} \
        ${DEVICES:+--devices "$DEVICES"} ${SEEDS:+--seeds $SEEDS} ${SHARD:+--shard "$SHARD"} \
        || FAILED+=("$name")
}

step_times() {
    "$PYTHON" -m profiling study step_ratio --device cuda --length 2000 --batch 32 --warmup 5 \
        --repeats 30 --out "reports/step_ratio_listops_cuda_$MONTH" || FAILED+=(step_times)
}

stage() {
    case $1 in
    predict) # time from operations at TFLOPS (default 10), memory by formula
        for table in mgk_table1 mgk_table2 mgk_table5; do
            "$PYTHON" -m lit_probattn.reproduce "$table" --only listops text --dry-run \
                --tflops "${TFLOPS:-10}" ${DATA:+--data_dir "$DATA"}
        done
        ;;
    step_times) step_times ;;
    listops | text | retrieval) # tables 1, 2 and 5 of MGK: 11 + 11 + 6 rows of each task
        reproduce "mgk_table1_$1" mgk_table1 --only "$1" $HALF
        reproduce "mgk_table2_$1" mgk_table2 --only "$1" $HALF
        reproduce "mgk_table2_$1_as_released" mgk_table2 --only "$1" --as_released $HALF
        reproduce "mgk_table5_$1" mgk_table5 --only "$1" $HALF
        if [ "$1" = retrieval ]; then
            reproduce mgk_table6 mgk_table6 $HALF
            reproduce mgk_table9 mgk_table9 $HALF
        fi
        ;;
    text_as_published) # selection on the test split, as published, and the released script's length
        reproduce mgk_table1_text_as_published mgk_table1 --only text --as_published $HALF
        reproduce mgk_table1_text_1000 mgk_table1 --only text --as_published $HALF \
            --set data.init_args.max_length_tokens=1000
        ;;
    wikitext) # days of GPU time; the small model first
        for table in mgk_table3 mgk_table10 fish_table1 fish_table10 fish_table11; do
            reproduce "$table" "$table" --only wikitext_small
        done
        reproduce mgk_table3_medium mgk_table3 --only wikitext_medium
        reproduce value_aware_table2 value_aware_table2
        ;;
    imagenet) reproduce fish_table5 fish_table5 ;;
    uea) reproduce fish_table6 fish_table6 ;;
    memory) "$PYTHON" -m lit_probattn.reproduce mgk_table7 --accelerator gpu || FAILED+=(memory) ;;
    *)
        echo "unknown stage $1; stages: predict step_times listops text text_as_published" \
            "retrieval memory uea wikitext imagenet" >&2
        exit 2
        ;;
    esac
}

STAGES=("$@")
[ $# -gt 0 ] || STAGES=(step_times listops text text_as_published memory retrieval uea wikitext imagenet)
for name in "${STAGES[@]}"; do stage "$name"; done
if [ ${#FAILED[@]} -gt 0 ]; then
    echo "not finished: ${FAILED[*]}; run the same command again" >&2
    exit 1
fi
