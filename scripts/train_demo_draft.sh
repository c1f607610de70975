#!/bin/sh
# How the shipped draft of the demo target was trained, on one GPU:
#   scripts/train_demo_draft.sh data SECONDS   answers of the target, by three processes at once
#   scripts/train_demo_draft.sh base SECONDS   the one-jump baseline; run again to go on
#   scripts/train_demo_draft.sh flow SECONDS   stage 1
#   scripts/train_demo_draft.sh map SECONDS    stage 2, from the flow's release
# RUN is the folder of everything (run); steps are set by BASE_STEPS, FLOW_STEPS, MAP_STEPS, whose learning
# rates come down by then; SECONDS stops a run early and still writes its release. A small model leaves a GPU
# idle between launches, so `base` beside `flow` and then `map` cost little more than alone.
set -eu
cd "$(dirname "$0")/.."
RUN=${RUN:-run}
PYTHON=${PYTHON:-python}
TARGET=${TARGET:-$("$PYTHON" scripts/demo_target.py --dtype bfloat16)}
what=$1 seconds=$2
mkdir -p "$RUN"
name=smollm2-135m-instruct
sizes="--hidden-size 384 --layers 3 --cond-dim 64 --block-size 8"
common="--target $TARGET --target-name $name --batch-size ${BATCH:-64} --anchors 32
    --max-length 512 --remember --seconds $seconds --release-early --validate-every 500 ${MORE:-}"
data=$(ls -d "$RUN"/data.*/ 2>/dev/null || true)

case $what in
data)
    for seed in ${SEEDS:-1 2 3}; do
        "$PYTHON" scripts/make_data.py --target "$TARGET" --target-name "$name" --output "$RUN/data.$seed" --seed "$seed" \
            --sampler transformers --count "${COUNT:-12000}" --batch-size 2048 --prompt-tokens 96 \
            --max-new-tokens 256 --max-length 512 --seconds "$seconds" 2>"$RUN/data.$seed.log" &
    done
    wait
    tail -n 2 "$RUN"/data.*.log
    ;;
base)
    "$PYTHON" scripts/train_draft.py $common $sizes --data $data --output "$RUN/base" --stage one-jump \
        --labels target --lr 2e-3 --steps "${BASE_STEPS:-3700}"
    ;;
flow)
    "$PYTHON" scripts/train_draft.py $common $sizes --data $data --output "$RUN/flow" --stage flow \
        --lr 2e-3 --steps "${FLOW_STEPS:-3500}"
    ;;
map)
    "$PYTHON" scripts/train_draft.py $common --data $data --output "$RUN/map" --stage map \
        --init "$RUN/flow/release" --data-weight 0.5 --labels target --lr 1e-3 --steps "${MAP_STEPS:-1300}"
    ;;
*)
    echo "error: $what is none of data, base, flow, map." >&2
    exit 1
    ;;
esac
