"""Trains FlashMap drafts: what `make_data.py`, `train_draft.py` and `eval_draft.py` are made of.

data     prompts.py → sampling.py → token_file.py: the target's own answers as tokens on disk
batches  anchors.py, features.py: conversations, anchors in them, the target's hidden states
model    draft_config.py, network.py: the DiT with the checkpoint's tensor names
flow     times.py, noise.py, objectives.py: the state at a time, the two stages, the baseline
run      optimiser.py, checkpoint.py, loop.py, estimate.py, parallel.py
result   acceptance.py, release.py, card.py

Needs torch, transformers, safetensors and numpy; matplotlib for the curves; sglang only where a
server measures or samples.
"""
