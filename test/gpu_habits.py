"""`sglang.launch_server` on a CPU with habits that a server only has on a GPU, for tests.

`GPU_HABITS` names them, separated by commas:
- `overlap`: FLASHMAP under overlap scheduling. Results reach the scheduler one step late, while the
  next step is already launched. A CPU server gains nothing by it and switches it off.
- `pin`: upstream's LoRA layers ask for pinned memory, which torch has with a GPU only; here it is
  ordinary memory.
"""

import functools
import os
import sys

import torch

HABITS = os.environ.get("GPU_HABITS", "").split(",")

if "pin" in HABITS and not torch.cuda.is_available():  # in every process of the server
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        make = getattr(torch, name)

        def unpinned(*args, _make=make, pin_memory=False, **kwargs):
            return _make(*args, **kwargs)

        setattr(torch, name, functools.wraps(make)(unpinned))

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.arg_groups import flashmap_hook
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if "overlap" in HABITS:
        flashmap_hook._resolve_schedule = lambda server_args: None
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
