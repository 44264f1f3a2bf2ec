#!/usr/bin/env bash
# All checks and measurements that need a GPU, in stages. Each stage writes to reports/kernels_<gpu>/ and is
# skipped if it has already finished there, so an interrupted run can be resumed. Needs no network.
#   bash profiling/cuda.sh                  all stages
#   bash profiling/cuda.sh parity tuning    only these stages
#   PYTHON=/path/to/python bash profiling/cuda.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export TRITON_DEFAULT_FP_FUSION=1 PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
STAGES=(environment parity tuning tests benchmark benchmark_fish memory table7 train sweep)

if ! GPU=$("$PYTHON" -c '
import re, sys, torch
if not torch.cuda.is_available():
    sys.exit("error: no CUDA device; this script measures on a GPU. Without one, run\n"
             "  TRITON_INTERPRET=1 python -m profiling kernels --parity\n"
             "  python -m profiling kernels --compile-table")
print(re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_"))
'); then exit 2; fi
OUT=reports/kernels_$GPU
mkdir -p "$OUT"

environment() {
    "$PYTHON" - <<'PY'
import torch
from lit_probattn.records.provenance import device_name, git_revision, versions

major, minor = torch.cuda.get_device_capability()
memory = torch.cuda.get_device_properties(0).total_memory / 2**30
print(f"- Hardware: {device_name('cuda')}, sm_{major}{minor}, {memory:.0f} GiB")
print(f"- Versions: {versions()}; revision {git_revision()}")
PY
}
parity() { # errors against float64 in bfloat16 and float32, compared with eager code
    "$PYTHON" -m profiling kernels --parity --device cuda --dtypes float32,bfloat16 \
        --head-dims 32,64 --out "$OUT/parity"
}
tuning() { "$PYTHON" -m profiling kernels --tune --out "$OUT/tuning"; }
tests() { "$PYTHON" -m pytest -q tests/kernels; }
benchmark() {
    "$PYTHON" -m profiling kernels --config configs/profiling/kernels_cuda.yaml --out "$OUT/benchmark"
}
benchmark_fish() {
    "$PYTHON" -m profiling kernels --config configs/profiling/kernels_fish_cuda.yaml \
        --out "$OUT/benchmark_fish"
}
memory() { # memory of a training step, linear in N
    "$PYTHON" -m profiling kernels --config configs/profiling/kernels_memory_cuda.yaml \
        --out "$OUT/memory"
}
table7() { # Retrieval, batch 32, two texts of 4096 tokens
    "$PYTHON" -m profiling sweep --config configs/profiling/mgk_table7_cuda.yaml &&
        "$PYTHON" -m profiling report --config configs/profiling/mgk_table7_cuda.yaml --out "$OUT/table7"
}
train() { "$PYTHON" -m profiling kernels --train-steps 200 --device cuda --out "$OUT/train"; }
sweep() {
    "$PYTHON" -m profiling sweep --config configs/profiling/attention_cuda.yaml &&
        "$PYTHON" -m profiling report --config configs/profiling/attention_cuda.yaml --out "$OUT/sweep"
}

CHOSEN=("$@")
[ ${#CHOSEN[@]} -gt 0 ] || CHOSEN=("${STAGES[@]}")
FAILED=()
for stage in "${CHOSEN[@]}"; do
    if [[ " ${STAGES[*]} " != *" $stage "* ]]; then
        echo "error: unknown stage $stage; expected some of: ${STAGES[*]}" >&2
        exit 2
    fi
    if [ -e "$OUT/$stage.done" ]; then
        echo "== $stage: already finished; remove $OUT/$stage.done to run it again"
        continue
    fi
    echo "== $stage"
    if "$stage" 2>&1 | tee "$OUT/$stage.log"; then
        touch "$OUT/$stage.done"
    else
        FAILED+=("$stage")
        echo "== $stage FAILED; see $OUT/$stage.log" >&2
    fi
done

{
    echo "# Fused kernels on ${GPU//_/ }"
    echo
    echo "- Command: \`bash profiling/cuda.sh ${*:-}\`"
    [ -e "$OUT/environment.log" ] && cat "$OUT/environment.log"
    echo
    for stage in "${STAGES[@]}"; do
        state="not run"
        [ -e "$OUT/$stage.log" ] && state="failed or unfinished"
        [ -e "$OUT/$stage.done" ] && state="passed"
        report=""
        [ -e "$OUT/$stage/report.md" ] && report=", [$stage/report.md]($stage/report.md)"
        echo "- $stage: $state$report"
    done
} >"$OUT/report.md"
cat "$OUT/report.md"
[ ${#FAILED[@]} -eq 0 ]
