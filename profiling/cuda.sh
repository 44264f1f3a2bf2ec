#!/usr/bin/env bash
# Everything that needs a GPU, in stages in the order of their value. Interrupt it at any moment: rows are
# on disk as soon as they are measured, and the same command goes on; what failed is tried again.
#
#   bash profiling/cuda.sh                              all stages, at most 30 minutes in all
#   bash profiling/cuda.sh --pack results.tar.gz        with an archive, also after failures and time-outs
#   bash profiling/cuda.sh checks speed --minutes 10    only these stages
#   bash profiling/cuda.sh --budget                     minutes predicted and rows; measures nothing
#   bash profiling/cuda.sh --rehearse                   everything, tiny, on the CPU: no GPU needed
#
# Results are in reports/kernels_<gpu>/. Needs no network. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONUNBUFFERED=1
exec "$PYTHON" -m profiling.stages "$@"
