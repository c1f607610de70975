"""What a run leaves behind: a folder that is served, loaded and described."""

from __future__ import annotations

import json
from pathlib import Path

import flashmap
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from served_draft import accept_length, served_draft
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.speculative.flashmap.checkpoint import check_folder
from train.card import card, write_card
from train.features import load_target
from train.release import draft_vocabulary
from train.token_file import TokenFiles


def test_served_draft_is_accepted_and_an_untrained_one_is_not(target: Path, data: Path, trained):
    release = trained("one-jump") / "release"
    model, files = load_target(target, "cpu"), TokenFiles([data])
    prompts = [files[i].tokens[: files[i].prompt_length].tolist() for i in (3, 24, 49)]
    draft = served_draft(release, model)
    other = served_draft(release, model, untrained=True)
    lengths = [accept_length(draft, model, prompt, 16) for prompt in prompts]
    baseline = [accept_length(other, model, prompt, 16) for prompt in prompts]
    assert np.mean(lengths) > 3.0  # of 5: blocks of 4 and the target's own token
    assert np.mean(baseline) < 1.5


@pytest.mark.parametrize("stage", ["one-jump", "map"])
def test_release_is_complete(stage: str, trained) -> None:
    release = trained(stage) / "release"
    config = FlashMapConfig.from_pretrained(release)
    check_folder(release, config, draft_vocab_size=config.vocab_size)
    package = flashmap.FlashMapDraftModel.from_pretrained(release)
    weights = load_file(release / "model.safetensors")
    assert set(weights) == set(package.state_dict())
    for name, value in package.state_dict().items():
        torch.testing.assert_close(value, weights[name])


def test_release_of_a_flow_says_that_it_is_one(trained) -> None:
    assert json.loads((trained("flow") / "release/config.json").read_text())["flow_map"] is False


def test_draft_vocabulary_ranks_the_answers_tokens(data: Path, trained) -> None:
    stored = load_file(trained("one-jump") / "release/draft_vocab.safetensors")
    files = TokenFiles([data])
    answers = [files[i].tokens[files[i].prompt_length :] for i in range(len(files))]
    counts = np.bincount(np.concatenate(answers), minlength=320)
    ids = stored["ids"].numpy()
    assert sorted(ids.tolist()) == list(range(320))
    np.testing.assert_array_equal(stored["counts"].numpy(), counts[ids])
    assert (np.diff(counts[ids]) <= 0).all()


def test_equal_counts_rank_by_id() -> None:
    assert draft_vocabulary(np.array([1, 5, 1, 5]))["ids"].tolist() == [1, 3, 0, 2]


def test_card_tells_data_recipe_and_acceptance(trained) -> None:
    release = trained("map") / "release"
    text = (release / "README.md").read_text()
    assert "## Stage: flow" in text and "## Stage: map" in text
    assert "60 answers of circle-target itself" in text
    assert "| learning rate | 0.01 |" in text
    record = json.loads((release / "training.json").read_text())
    steps, run = record["runs"][-1]["recipe"]["steps"], record["runs"][-1]
    assert f"| steps | {steps} |" in text and run["steps_done"] == steps
    run["steps_done"] = 2
    config = json.loads((release / "config.json").read_text())
    stopped = card(config, record, None, drawn=False)
    assert f"| steps | 2 of {steps}, where the run was stopped |" in stopped
    evaluation = {
        "verify_width": 3,
        "arguments": {"speculative_use_block_verification": True, "speculative_eagle_topk": 1},
        "overall": {"0": {"accept_length": 2.25}},
        "domains": [
            {"domain": "code", "temperature": 0.0, "prompts": 7, "accept_length": 2.25,
             "slots": [0.75, 0.5]}
        ],
    }  # fmt: skip
    (release / "evaluation.json").write_text(json.dumps(evaluation))
    write_card(release)
    text = (release / "README.md").read_text()
    flags = "--speculative-use-block-verification --speculative-eagle-topk 1`"
    assert f"With `--speculative-num-draft-tokens 3 {flags}" in text
    assert "2.25 at T=0" in text and "| code | 0 | 7 | 2.25 | 0.75 | 0.50 |" in text
    plain = {"mode": "plain", "requests": 1, "tokens_per_second": 400.0, "ratio": 1.0}
    chain = {"mode": "chain", "requests": 1, "tokens_per_second": 600.0, "ratio": 1.5}
    rows = [plain | {"arguments": {}}, chain | {"arguments": {"speculative_num_draft_tokens": 9}}]
    speed = {"device": "GPU", "temperature": 0.0, "prompts": 30, "rows": rows}
    (release / "speed.json").write_text(json.dumps(speed))
    write_card(release)
    text = (release / "README.md").read_text()
    assert "On one GPU, 1.50 times plain decoding's tokens per second (T=0, one request" in text
    assert "| plain | 1 | 400 | 1.00× |" in text
    assert "| `--speculative-num-draft-tokens 9` | 1 | 600 | 1.50× |" in text
    (release / "speed.json").unlink()
    (release / "evaluation.json").unlink()
