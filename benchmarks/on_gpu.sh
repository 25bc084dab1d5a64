#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under ten minutes and without a network: see on_gpu.py.
#
#     bash benchmarks/on_gpu.sh [RESULTS]      # default $OUT, else benchmarks/results/gpu
#     bash benchmarks/on_gpu.sh --smoke        # tiny sizes on a CPU, keeps nothing
#
# PYTHON names the interpreter, LIMIT_S the seconds for all of it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
arguments=("$@")
[[ $# -eq 0 && -n ${OUT:-} ]] && arguments=("$OUT")
[[ -n ${LIMIT_S:-} ]] && arguments+=(--seconds "$LIMIT_S")
exec "${PYTHON:-python3}" "$here/on_gpu.py" ${arguments[@]+"${arguments[@]}"}
