#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under ten minutes and without a network:
#
#     bash benchmarks/on_gpu.sh [RESULTS_FOLDER]      # default $OUT, else benchmarks/results/gpu
#     bash benchmarks/on_gpu.sh --smoke               # tiny sizes on a CPU, keeps and reports nothing
#
# Needs torch, transformers, triton, pytest and pytest-benchmark, not an installed tinyspec. Writes to the
# results folder alone. A step that fails or runs out of time does not stop the others; the exit status
# says whether any did, summary.md which. PYTHON names the interpreter, LIMIT_S the seconds for all of it.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
prefix=$("$python" -c "import sys; print(sys.prefix)") || exit 1
smoke=
if [[ ${1:-} == --smoke ]]; then
    smoke=1
    out=$(mktemp -d)
else
    out=${1:-${OUT:-$root/benchmarks/results/gpu}}
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
fi
cache=$(mktemp -d "$out/cache.XXXXXX")
trap 'rm -rf "$cache" ${smoke:+"$out"}' EXIT
# The smoke run must pass on a busy machine as well: only a step that hangs takes so long.
default_limit=570
[[ -n $smoke ]] && default_limit=3600
deadline=$((SECONDS + ${LIMIT_S:-$default_limit}))
failed=0

cd "$root" || exit 1
export PYTHONPATH=$root PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TMPDIR=$cache HF_HOME=$cache/hf TRITON_CACHE_DIR=$cache/triton
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor HYPOTHESIS_STORAGE_DIRECTORY=$cache/hypothesis
unset TRITON_INTERPRET

summary=$out/summary.md
printf '| step | result | seconds |\n| --- | --- | --- |\n' >"$summary"

# step NAME SECONDS COMMAND...: run it, within its own and the whole run's time; its log is NAME.log.
step() {
    local name=$1 limit=$2 began=$SECONDS left=$((deadline - SECONDS)) status=0 result
    shift 2
    if [[ -n $smoke ]] || ((left < limit)); then
        limit=$left
    fi
    if ((limit < 5)); then
        status=124
    else
        timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
        sed -i -e "s#$out#RESULTS#g" -e "s#$root#.#g" -e "s#$prefix#PYTHON#g" "$out/$name.log"
    fi
    case $status in
        0) result=passed ;;
        5) [[ $* == *pytest* ]] && result='no tests' || result='failed (5)' ;;
        124 | 137) result='out of time' ;;
        *) result="failed ($status)" ;;
    esac
    [[ $result == passed || $result == 'no tests' ]] || failed=1
    printf '| %s | %s | %d |\n' "$name" "$result" $((SECONDS - began)) >>"$summary"
    printf '%-28s %s\n' "$name" "$result"
    [[ $failed == 1 && -n $smoke && $result != passed ]] && tail -n 20 "$out/$name.log"
    return 0
}

tests=("$python" -m pytest -q -p no:cacheprovider --basetemp="$cache/pytest" -rfEs --durations=5)
probe=("$python" benchmarks/probe.py)
smoke_flag=()
grep -qs -e '--smoke' benchmarks/conftest.py && smoke_flag=(--smoke)

if [[ -n $smoke ]]; then
    step environment 60 "$python" -c 'from benchmarks.environment import environment; print(environment())'
    [[ -d tests ]] && step tests-collected 120 "${tests[@]}" -m gpu tests --collect-only
    step doctor-tiny 60 "$python" -c 'import torch, tinyspec
from benchmarks.presets import build
report = tinyspec.doctor(build("tiny", torch.bfloat16, "cpu"), fresh=True)
print(report)
raise SystemExit(not report)'
    step probe-tiny 120 "${probe[@]}" --preset tiny --device cpu --dtype bfloat16 --rows 1,2,4,32 \
        --pool 32 --agreement 32 --json "$out/probe-tiny.json"
    for file in benchmarks/bench_*.py; do
        [[ -e $file ]] || continue
        name=$(basename "$file" .py)
        step "$name" 90 "${tests[@]}" "$file" "${smoke_flag[@]}" \
            --benchmark-disable
    done
    step tables 60 "$python" benchmarks/render.py "$out/probe-tiny.json"
else
    nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || true
    step environment 60 "$python" -c 'import json, sys
from benchmarks.environment import environment
json.dump(environment("cuda"), open(sys.argv[1], "w"), indent=1)' "$out/environment.json"
    step kernels 150 "${tests[@]}" tests/kernels --junitxml="$out/kernels.xml"
    step tests-gpu 150 "${tests[@]}" -m gpu tests --ignore=tests/kernels --junitxml="$out/tests-gpu.xml"
    for preset in qwen3-0.6b llama-3.1-8b; do
        step "doctor-$preset" 60 "$python" -c 'import sys, torch, tinyspec
from benchmarks.presets import build
layers = 8 if "8b" in sys.argv[1] else None
model = build(sys.argv[1], torch.bfloat16, "cuda", layers=layers)
print(tinyspec.doctor(model, tinyspec.EngineConfig(max_model_len=4096), fresh=True))' "$preset"
    done
    step probe-qwen3-0.6b 100 "${probe[@]}" --preset qwen3-0.6b --dtype bfloat16 --layers 14 --pool 128 \
        --device cuda --json "$out/probe-qwen3-0.6b.json"
    for file in benchmarks/bench_*.py; do
        [[ -e $file ]] || continue
        name=$(basename "$file" .py) limit=100 flags=()
        # Its sweeps are long: one dtype, one round.
        [[ $name == bench_share ]] && limit=150 flags=(-k bfloat16 --rounds 1)
        step "$name" "$limit" "${tests[@]}" "$file" "${flags[@]}" --benchmark-enable \
            --benchmark-only --benchmark-json="$out/$name.json"
    done
    step probe-llama-3.1-8b 100 "${probe[@]}" --preset llama-3.1-8b --dtype bfloat16 --layers 4 \
        --pool 128 --device cuda --json "$out/probe-llama-3.1-8b.json"
    step probe-split-k-off 60 "${probe[@]}" --preset qwen3-0.6b --dtype bfloat16 --layers 4 --pool 128 \
        --device cuda --parts linears,model_pass --split-k off --json "$out/probe-split-k-off.json"
    mapfile -t saved < <(find "$out" -maxdepth 1 -name '*.json' -size +0 ! -name 'env*' | sort)
    if ((${#saved[@]})); then
        step tables 30 "$python" benchmarks/render.py --scrub "${saved[@]}"
        mv "$out/tables.log" "$out/tables.md"
    fi
    sed -i 's/ hostname="[^"]*"//' "$out"/*.xml 2>/dev/null
fi

echo
cat "$summary"
exit $failed
