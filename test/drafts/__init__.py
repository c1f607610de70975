"""Draft models for tests, which a server loads with `SGLANG_EXTERNAL_MODEL_PACKAGE=drafts`.

Each is a FlashMap release folder to the server (config.json, weights and all its checks) whose
`architectures` names a class here: `OracleDraftModel` replays known continuations, corrupted at
will; `RecordingDraftModel` also runs the real network and keeps what it drafted;
`ProposalDraftModel` draws from given distributions. `folders.py` writes the folders. They read
tensors on the host in every step, so they are for CPU servers (no CUDA graph);
`DeviceOracleDraftModel` replays from tables on the device, for GPUs.
"""
