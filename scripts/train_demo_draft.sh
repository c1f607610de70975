#!/bin/sh
# How the shipped draft of the demo target was trained, on one GPU:
#   scripts/train_demo_draft.sh data SECONDS   answers to turns the target writes, by three processes at once
#   scripts/train_demo_draft.sh asks SECONDS   answers to prompts from templates, likewise
#   scripts/train_demo_draft.sh base SECONDS   the one-jump baseline on `data`; run again to go on
#   scripts/train_demo_draft.sh more SECONDS   the same from there on `data` and `asks`
#   scripts/train_demo_draft.sh accept SECONDS from there for acceptance at T = 1
#   scripts/train_demo_draft.sh finish SECONDS the same from there at a lower rate: the draft that is shipped
#   scripts/train_demo_draft.sh flow SECONDS   stage 1
#   scripts/train_demo_draft.sh map SECONDS    stage 2, from the flow's release
# RUN is the folder of everything (run); steps are set by BASE_STEPS, MORE_STEPS, ACCEPT_STEPS, FINISH_STEPS, FLOW_STEPS, MAP_STEPS,
# whose learning rates come down by then; SECONDS stops a run early and still writes its release. A small model leaves a GPU
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
    --max-length 512 --remember --seconds $seconds --release-early --validate-every ${VALIDATE_EVERY:-500} ${ARGUMENTS:-}"
data=$(ls -d "$RUN"/data.*/ 2>/dev/null || true)
asks=$(ls -d "$RUN"/asks.*/ 2>/dev/null || true)

# further RUN RATE STEPS [ARGUMENT ...]: the one-jump draft of RUN, trained on both kinds of prompts
further() {
    from=$1 rate=$2 steps=$3
    shift 3
    "$PYTHON" scripts/train_draft.py $common --data $asks $data --output "$RUN/$what" --stage one-jump \
        --init "$RUN/$from/release" --labels target --lr "$rate" --slot-decay 3 --steps "$steps" "$@"
}

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
asks)
    engine='{"mem_fraction_static": 0.9, "max_total_tokens": 400000, "max_running_requests": 1024, "disable_radix_cache": true,
        "cuda_graph_bs_decode": [64, 256, 512, 1024], "sampling_backend": "pytorch"}'
    for part in 1 2 3; do
        "$PYTHON" scripts/make_prompts.py --count "${COUNT:-48000}" --part "$part/3" --output "$RUN/asks.$part.jsonl"
        "$PYTHON" scripts/make_data.py --target "$TARGET" --target-name "$name" --output "$RUN/asks.$part" --seed "1$part" \
            --prompts "$RUN/asks.$part.jsonl" --sampler "${SAMPLER:-engine}" --engine-arguments "$engine" \
            --batch-size 4096 --max-new-tokens 256 --max-length 512 --temperatures 0 0.6 1 --seconds "$seconds" \
            2>"$RUN/asks.$part.log" &
    done
    wait
    tail -n 2 "$RUN"/asks.*.log
    ;;
base)
    "$PYTHON" scripts/train_draft.py $common $sizes --data $data --output "$RUN/base" --stage one-jump \
        --labels target --lr 2e-3 --steps "${BASE_STEPS:-3700}"
    ;;
more)
    further base 1.5e-3 "${MORE_STEPS:-5300}"
    ;;
accept)
    further more 1e-3 "${ACCEPT_STEPS:-5500}" --acceptance-weight 0.8 --acceptance-loss length
    ;;
finish)
    further accept 6e-4 "${FINISH_STEPS:-3200}" --acceptance-weight 0.8 --acceptance-loss length
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
    echo "error: $what is none of data, asks, base, more, accept, finish, flow, map." >&2
    exit 1
    ;;
esac
