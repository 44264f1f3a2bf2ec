#!/usr/bin/env bash
# What needs a GPU, in the order of its value: are the kernels right, how fast are they, what do models cost,
# what do they learn. Interrupt it at any moment and run it again: rows are on disk as they are measured, what is
# finished is not repeated, what failed is tried again. It needs no network.
#
#   bash profiling/cuda.sh                  everything but `papers`, which takes weeks
#   bash profiling/cuda.sh kernels models   these parts, in this order
# PYTHON   interpreter (default .venv/bin/python, else python3)
# OUT      folder of the reports (default reports/cuda); rows of sweeps are in runs/profiling, trainings in runs
# MINUTES  upper limit of every command, below its own
# DATA     folder of the releases; without it `tables` trains ListOps, which is generated, alone
# JOBS     trainings at a time (default 4: one alone does not fill a GPU)
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-reports/cuda}
PARTS=(kernels tests table7 models sweeps tuning tables)
FAILED=()
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1

run() { # minutes, then a module and its arguments
    local minutes=$1
    shift
    [ "$minutes" -le "${MINUTES:-$minutes}" ] || minutes=$MINUTES
    echo "== $* (at most $minutes minutes)"
    timeout --signal INT --kill-after 60 "${minutes}m" "$PYTHON" -m "$@" || { FAILED+=("$*") && false; }
}
once() { # as run, for a command that cannot go on by itself: a mark is kept when it has passed
    local mark="$OUT/$1.passed"
    [ -e "$mark" ] || { run "${@:2}" && mkdir -p "$OUT" && touch "$mark"; }
}
kernels() { run "$1" profiling kernels --config "$2" --out "$OUT/${3:-$2}"; }
trained() { run 1440 lit_probattn.reproduce "$@" ${DATA:+--data_dir "$DATA"} --accelerator gpu --jobs "${JOBS:-4}" --out "$OUT/$1"; }
sweep() { run 30 profiling sweep --config "$1"; run 5 profiling report --config "$1" --out "$OUT/$1"; }
part() {
    case $1 in
    kernels) kernels 20 kernels_cuda ;;
    models) for name in lm_cuda lm_fish_cuda; do sweep $name; done ;;
    tests) once tests 20 pytest -W default::UserWarning -q -m "not slow" tests/kernels
        once train 20 profiling kernels --train-steps 200 --device cuda --out "$OUT/train" ;;
    table7) run 30 lit_probattn.reproduce mgk_table7 --accelerator gpu --out "$OUT/mgk_table7"
        once step_ratio 15 examples.studies.step_ratio --length 2000 --batch 32 --device cuda --out "$OUT/step_ratio" ;;
    sweeps) for name in attention lm_long lm_wide lm_linear lm_fish_long encoder_decoder retrieval_heads \
        listops_settings; do sweep "${name}_cuda"; done ;;
    tuning) once tuning 60 profiling kernels --tune --out "$OUT/tuning" && kernels 20 kernels_cuda kernels_cuda_tuned ;;
    tables) for table in mgk_table{1,2,5}; do
        trained $table --only listops ${DATA:+text retrieval} --trainer one_gpu; done ;;
    papers) for table in mgk_table{3,6,9,10} fish_table{1,5,6,10,11} value_aware_table2; do trained $table; done ;;
    esac
}

for name in "$@"; do
    [[ " ${PARTS[*]} papers " == *" $name "* ]] || { echo "error: unknown part $name; parts: ${PARTS[*]} papers" >&2 && exit 2; }
done
"$PYTHON" -c 'import torch; torch.cuda.is_available() or exit("error: no CUDA device")' || exit 2
for name in "${@:-${PARTS[@]}}"; do part "$name"; done
[ ${#FAILED[@]} -eq 0 ] || { printf 'not finished: %s\n' "${FAILED[@]}" >&2 && exit 1; }
