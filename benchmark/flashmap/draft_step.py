"""Time of one draft alone, at Qwen3-8B shapes, against the bytes it must read.

    python benchmark/flashmap/draft_step.py --json out/draft_step.json

The drafter of a server is built with random weights and captured as a server captures it; a row is
the median over graph replays timed with CUDA events. Floor: every weight a draft uses and the
context keys and values of its requests, read once, at this GPU's measured copy bandwidth (weights
of 0.9 GB do not fit in the cache). Needs one NVIDIA GPU and the installed fork, no model files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.flashmap import launch, skinny_linear
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models import flashmap
from sglang.srt.models.flashmap import FlashMapDraftModel
from sglang.srt.speculative.flashmap.attention import ContextAttention, select_context_attention
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.drafter import Drafter, DraftInputs
from sglang.srt.speculative.flashmap.noise import SeedTable


class Pool:
    """Per-layer buffers as a draft KV pool has them."""

    def __init__(self, slots: int, config: FlashMapConfig, dtype: torch.dtype) -> None:
        shape = (slots, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.randn(shape, device="cuda", dtype=dtype) for _ in layers]
        self.values = [torch.randn(shape, device="cuda", dtype=dtype) for _ in layers]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values[layer]


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source), 20) * 1e3


def median_ms(call, repeats: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def build(options: argparse.Namespace) -> tuple[Drafter, FlashMapDraftModel, DraftInputs]:
    config = FlashMapConfig(draft_vocab_size=options.draft_vocab_size)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = FlashMapDraftModel(config)
        embedding = torch.randn(config.vocab_size, config.target_hidden_size) * 0.02
    torch.set_default_dtype(torch.float32)
    serve = FlashMapServeConfig(
        block_size=config.block_size,
        verify_width=config.block_size + 1,
        grid=tuple(config.grid()),
        draft_vocab_size=options.draft_vocab_size,
        block_verification=False,
        noise=options.noise,
        noise_error=options.noise_error,
        draft_quantization=options.quantization,
        tree_candidates=options.tree_candidates,
        tree_budget=options.tree_budget,
    )
    attention = select_context_attention(
        "cuda", head_dim=config.head_dim, pool_dtype=torch.bfloat16
    )
    if options.attention == "triton":
        attention = ContextAttention()
    model.attach_target(
        embedding=embedding,
        lm_head=embedding,
        lm_head_bias=None,
        logit_scale=1.0,
        serve=serve,
        attention=attention,
    )
    most, width = max(options.batch_sizes), max(options.contexts) + 64
    slots = most * width + 1
    pool = Pool(slots, config, torch.bfloat16)
    table = torch.randperm(slots - 1, device="cuda", dtype=torch.int32)[: most * width] + 1
    req_to_token = table.view(most, width).contiguous()
    drafter = Drafter(
        model=model,
        serve=serve,
        seed_table=SeedTable(most, "cuda", 0),
        req_to_token=req_to_token,
        pool=pool,
    )
    drafter.capture(options.batch_sizes, "cuda")
    inputs = DraftInputs.allocate(most, "cuda")
    inputs.rows.copy_(torch.arange(most))
    inputs.anchors.random_(config.vocab_size)
    inputs.active.fill_(1)
    inputs.temperatures.fill_(options.temperature)
    return drafter, model, inputs


def weight_bytes(model: FlashMapDraftModel) -> int:
    """Of all that a draft multiplies with."""
    products = [tensor for product in model.products() for tensor in product.tensors()]
    if not model.serve.folds_noise(model.fc.weight.device):
        products.append(model._noise_factor)
    return sum(tensor.nbytes for tensor in products)


def launches(drafter: Drafter, size: int) -> int:
    """Kernels and copies of one replay of the graph of ``size`` requests."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as result:
        drafter.replay(size)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in result.events())


def check(drafter: Drafter, inputs: DraftInputs) -> None:
    """Print how far our products and fused norms are from the library's and plain ones, and whether
    replays, whose kernels start early, are what the same kernels make one after another."""
    early = launch.dependent_launch
    for size in (n for n in (1, 16) if n in drafter._graphs):
        batch = inputs.head(size)
        launch.dependent_launch = lambda device: False
        in_order = drafter._draft(batch).logits.clone()
        launch.dependent_launch = early
        same = sum(torch.equal(drafter.draft(batch).logits, in_order) for _ in range(200))
        print(f"{size} requests: {same} of 200 replays equal to launches in order")
    fused, most = flashmap.can_fuse, skinny_linear.MAX_ROWS
    for size in (1, 4):
        batch = inputs.head(size)
        ours = drafter._draft(batch).logits.float()
        flashmap.can_fuse, skinny_linear.MAX_ROWS = (lambda x, dim: False), 0
        theirs = drafter._draft(batch).logits.float()
        flashmap.can_fuse, skinny_linear.MAX_ROWS = fused, most
        error = float((ours - theirs).norm() / theirs.norm())
        print(f"{size} requests: relative difference of the logits {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where to save the rows")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 8192])
    parser.add_argument("--draft-vocab-size", type=int, default=32768)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--attention", choices=("auto", "triton"), default="auto")
    parser.add_argument("--noise", choices=("auto", "cholesky", "folded"), default="auto")
    parser.add_argument("--noise-error", type=float, default=0.0)
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--linear", choices=("skinny", "library"), default="skinny")
    parser.add_argument("--no-dependent-launch", action="store_true")
    parser.add_argument("--no-fused-norms", action="store_true", help="a kernel for each AdaLN")
    parser.add_argument(
        "--tree-candidates", type=int, default=0, help="blocks per request, planned"
    )
    parser.add_argument("--tree-budget", type=int, default=32, help="blocks per batch")
    parser.add_argument("--check", action="store_true", help="compare logits with the library's")
    parser.add_argument("--profile", help="write kernel times and a draft's timeline here")
    options = parser.parse_args()
    # What a server decides by the device, so that each can be measured without the other.
    if options.linear == "library":
        skinny_linear.MAX_ROWS = 0
    if options.no_dependent_launch:
        launch.dependent_launch = lambda device: False
    if options.no_fused_norms:
        flashmap.can_fuse = lambda x, dim: False
    drafter, model, inputs = build(options)
    config, bandwidth = model.config, copy_bandwidth()
    if options.check:
        inputs.seq_lens.fill_(min(options.contexts))
        with torch.inference_mode():
            check(drafter, inputs)
    weights = weight_bytes(model)
    print(
        f"{torch.cuda.get_device_name(0)}, copy {bandwidth / 1e12:.2f} TB/s, draft weights "
        f"{weights / 1e6:.0f} MB, context attention {model.attention.name}"
    )
    print("| requests | context | ms | floor ms | times the floor | launches |")
    print("|---|---|---|---|---|---|")
    rows = []
    for context in options.contexts:
        for size in options.batch_sizes:
            inputs.seq_lens.fill_(context)
            kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
            floor = (weights + size * context * kv) / bandwidth * 1e3
            batch = inputs.head(size)
            drafter.draft(batch)
            ms = median_ms(lambda size=size: drafter.replay(size), 50)
            count = launches(drafter, size)
            row = dict(requests=size, context=context, ms=ms, floor_ms=floor, launches=count)
            rows.append(row)
            print(
                f"| {size} | {context} | {ms:.3f} | {floor:.3f} | {ms / floor:.2f} | {count} |",
                flush=True,
            )
    if options.profile:
        profile(drafter, inputs, options.profile)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(
            json.dumps(dict(gpu=torch.cuda.get_device_name(0), bandwidth=bandwidth, rows=rows))
        )


def profile(drafter: Drafter, inputs: DraftInputs, path: str) -> None:
    """Write how long each kernel of a draft of one request takes, then one draft's in order. A
    kernel that starts early counts from then on, its wait for the one before included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    batch = inputs.head(1)
    with torch_profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(5):
            drafter.draft(batch)
        torch.cuda.synchronize()
    lines = [result.key_averages().table(sort_by="cuda_time_total", row_limit=40)]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        result.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = sorted(
        (e["ts"], e["dur"], e["args"]["stream"], e["name"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    last = kernels[-len(kernels) // 5 :]
    begin = last[0][0]
    lines.append("   start µs      end µs  stream  kernel")
    for start, took, stream, name in last:
        lines.append(
            f"{start - begin:11.1f} {start - begin + took:11.1f} {stream:7}  {name[:90]}"
        )
    Path(path).write_text("\n".join(lines))


if __name__ == "__main__":
    main()
