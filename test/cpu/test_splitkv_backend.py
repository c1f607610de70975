"""The triton backend's verify step with split-KV attention, as EAGLE, DFLASH and NGRAM call it.

Against float64, one row at a time, with the kernel under Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 5
PREFIXES = [7, 40, 1]
# algorithm, tree, window, through a graph's buffers
CASES = {
    "eagle-tree": ("EAGLE", True, None, False),
    "eagle-tree-captured": ("EAGLE", True, None, True),
    "ngram-tree-captured": ("NGRAM", True, None, True),
    "ngram-tree-window": ("NGRAM", True, 6, False),
    "dflash-chain": ("DFLASH", False, None, False),
    "dflash-chain-captured": ("DFLASH", False, None, True),
    "dflash-chain-window-captured": ("DFLASH", False, 6, True),
}


def make_case(name: str) -> dict:
    algorithm, tree, window, captured = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    batch, slots, context = len(PREFIXES), 200, 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    mask = None
    if tree:
        mask = torch.zeros(batch, WIDTH, WIDTH, dtype=torch.bool)
        for b in range(batch):
            for node in range(WIDTH):
                if node:
                    parent = int(torch.randint(node, (), generator=generator))
                    mask[b, node] = mask[b, parent]
                mask[b, node, node] = True
    return dict(
        algorithm=algorithm,
        q=random(batch * WIDTH, HEADS, DIM),
        k=random(batch * WIDTH, KV_HEADS, DIM),
        v=random(batch * WIDTH, KV_HEADS, DIM),
        key_buffer=random(slots, KV_HEADS, DIM),
        value_buffer=random(slots, KV_HEADS, DIM),
        table=torch.stack(
            [torch.randperm(slots, generator=generator)[:context] for _ in range(batch + 1)]
        ).int(),
        rows=torch.tensor([2, 0, 3]),
        prefixes=torch.tensor(PREFIXES),
        mask=mask,
        window=window,
        captured=captured,
    )


def exact(case: dict) -> torch.Tensor:
    output = torch.zeros(case["q"].shape, dtype=torch.float64)
    for b, prefix in enumerate(PREFIXES):
        mask = torch.ones(WIDTH, WIDTH).tril() if case["mask"] is None else case["mask"][b]
        depth = mask.sum(1) - 1
        for i in range(WIDTH):
            reach = prefix + int(depth[i]) - (case["window"] or 1000)
            slots = case["table"][case["rows"][b], max(0, reach) : prefix].long()
            seen = [j for j in range(WIDTH) if mask[i, j] and prefix + depth[j] >= reach]
            rows = [b * WIDTH + j for j in seen]
            keys = torch.cat((case["key_buffer"][slots], case["k"][rows])).double()
            values = torch.cat((case["value_buffer"][slots], case["v"][rows])).double()
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                scores = keys[:, kv_head] @ case["q"][b * WIDTH + i, head].double() * 0.3
                output[b * WIDTH + i, head] = scores.softmax(0) @ values[:, kv_head]
    return output


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("verify")
    torch.save([make_case(name) for name in CASES], folder / "cases.pt")
    script = Path(__file__).with_name("interpreted_verify.py")
    command = [sys.executable, script, folder / "cases.pt", folder / "results.pt"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(zip(CASES, torch.load(folder / "results.pt")))


@pytest.mark.parametrize("name", CASES)
def test_verify_matches_float64(name: str, outputs: dict[str, torch.Tensor]) -> None:
    expected = exact(make_case(name))
    torch.testing.assert_close(outputs[name].double(), expected, rtol=4e-6, atol=4e-6)
