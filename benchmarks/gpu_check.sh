#!/usr/bin/env bash
# All parts of benchmarks/gpu_check.py on a GPU, from a checkout, with nothing installed: 345 seconds at most.
#
#     benchmarks/gpu_check.sh                         # writes $OUT/gpu.json, or benchmarks/results/gpu.json
#     OUT=folder benchmarks/gpu_check.sh --device cpu --tiny    # tries the script itself
#
# Each part is a process of its own with its own limit in seconds, so that one that hangs takes nothing from the others.
# What a part found before it was cut is in the results. The last line is the results as JSON. Exit status: 1 if a
# result was wrong or a part was cut or failed, else 0; a goal of speed that was missed is "met": false in its row.
set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
results=${OUT:-benchmarks/results}/gpu.json
status=0
run=$(date +%s)
for part in correctness:95 protocol:125 wide:50 floor:40 reads:35; do
    timeout "${part#*:}" "$python" -m benchmarks.gpu_check --part "${part%:*}" --run-id "$run" "$@" | sed -u '/^{/d'
    ended=${PIPESTATUS[0]}
    [ "$ended" -eq 124 ] && echo "    cut after ${part#*:} seconds"
    [ "$ended" -ne 0 ] && status=1
done
"$python" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))' "$results" || status=1
exit $status
