"""The model card of a draft, README.md and curves.png, from what its folder records.

training.json is written by the trainer, evaluation.json (optional) by `eval_draft.py`, which writes
the card again, speed.json (optional) by `benchmark/flashmap/demo_modes.py --speed`. Without
matplotlib the card has no picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.pictures import load_pyplot

_RECIPE_WORDS = {
    "steps": "steps",
    "batch_size": "conversations a batch",
    "anchors": "anchors a conversation",
    "max_length": "tokens of context at most",
    "learning_rate": "learning rate",
    "ema": "moving average",
    "slot_decay": "slots over which the loss weight falls by e",
    "labels": "labels of the one-jump term",
    "one_jump": "share of blocks that jump 0 → 1",
    "diagonal": "share of blocks on the diagonal",
    "data_weight": "weight of the one-jump term",
    "acceptance_weight": "share of the loss on what rejection keeps",
    "acceptance_loss": "that share's loss",
    "seed": "seed",
}
_STAGES_OF = {
    "labels": ("map", "one-jump"),
    "one_jump": ("map",),
    "diagonal": ("map",),
    "data_weight": ("map",),
    "acceptance_weight": ("one-jump",),
    "acceptance_loss": ("one-jump",),
}
"""Settings that only some stages have."""


def write_card(folder: Path) -> None:
    """Writes README.md and curves.png into a release folder."""
    config = json.loads((folder / "config.json").read_text())
    record = json.loads((folder / "training.json").read_text())
    evaluation, speed = _optional(folder / "evaluation.json"), _optional(folder / "speed.json")
    drawn = draw_curves(folder / "curves.png", record["runs"])
    (folder / "README.md").write_text(card(config, record, evaluation, drawn, speed))


def _optional(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def card(
    config: dict, record: dict, evaluation: dict | None, drawn: bool, speed: dict | None = None
) -> str:
    """The text of README.md."""
    target = config["target_model"]
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: sglang",
        "tags: [speculative-decoding, flashmap]",
        "---",
        f"# A FlashMap draft for {target}",
        "",
        " ".join([_headline(config, record, evaluation), *_speed_headline(speed)]),
        "",
        f"Serve it: `python -m sglang.launch_server --model-path {target} "
        "--speculative-algorithm FLASHMAP --speculative-draft-model-path DIR`.",
        "",
        "## The draft",
        f"{record['parameters'] / 1e6:.1f}M parameters: {config['num_hidden_layers']} layers of "
        f"width {config['hidden_size']}, blocks of {config['block_size']} tokens, reading the "
        f"outputs of target layers {config['target_layer_ids']}.",
        "",
        "## Data",
        f"{record['data']['conversations']} answers of {record['data']['target']} itself, "
        f"{record['data']['tokens'] / 1e6:.2f}M tokens with their prompts, sampled at temperatures "
        f"{', '.join(f'{t:g}' for t in record['data']['temperatures'])}. One conversation in 25 "
        "was held out.",
    ]
    for run in record["runs"]:
        lines += ["", f"## Stage: {run['recipe']['stage']}", *_recipe(run)]
    if drawn:
        lines += ["", "![loss and accept length over the steps](curves.png)"]
    if evaluation:
        flags = {"speculative_num_draft_tokens": evaluation["verify_width"]}
        flags |= evaluation.get("arguments", {})
        words = " ".join(_flag(name, value) for name, value in flags.items())
        lines += ["", "## Acceptance with the server", f"With `{words}`:", ""]
        lines += acceptance_table(evaluation)
        if evaluation.get("plot"):
            lines += ["", f"![acceptance of each slot, and its histogram]({evaluation['plot']})"]
    if speed:
        lines += ["", "## Speed", *_speed_table(speed)]
    return "\n".join(lines) + "\n"


def _speed_headline(speed: dict | None) -> list[str]:
    """The best mode at the smallest batch size."""
    if not speed:
        return []
    fewest = min(row["requests"] for row in speed["rows"])
    best = max((r for r in speed["rows"] if r["requests"] == fewest), key=lambda r: r["ratio"])
    requests = "one request" if fewest == 1 else f"{fewest} requests"
    return [
        f"On one {speed['device']}, {best['ratio']:.2f} times plain decoding's tokens per second "
        f"(T={speed['temperature']:g}, {requests} at a time)."
    ]


def _speed_table(speed: dict) -> list[str]:
    rows = [
        f"{speed['prompts']} held-out prompts, T={speed['temperature']:g}, one {speed['device']}, "
        "plain decoding and each mode in one run (`benchmark/flashmap/demo_modes.py`):",
        "",
        "| | requests at a time | tokens per second | of plain decoding's |",
        "|---|---|---|---|",
    ]
    for row in speed["rows"]:
        flags = " ".join(_flag(name, value) for name, value in row["arguments"].items())
        name = f"`{flags}`" if flags else row["mode"]
        rate, ratio = row["tokens_per_second"], row["ratio"]
        rows.append(f"| {name} | {row['requests']} | {rate:.0f} | {ratio:.2f}× |")
    return rows


def _headline(config: dict, record: dict, evaluation: dict | None) -> str:
    if evaluation:
        overall = evaluation["overall"]
        parts = [f"{value['accept_length']:.2f} at T={heat}" for heat, value in overall.items()]
        return f"Tokens a target pass, measured with the server: {', '.join(parts)}."
    if not config["flow_map"]:
        return "A stage-1 flow: the start of a draft, not one that can be served."
    curves = record["runs"][-1]["curves"]
    if not curves["accept_length"]:
        return "Not evaluated yet."
    words = f"on held-out greedy text, one jump: {curves['accept_length'][-1][1]:.2f}"
    if curves.get("sampled_accept_length"):
        words += f"; sampled, T = 1: {curves['sampled_accept_length'][-1][1]:.2f}"
    return f"Tokens a target pass {words}."


def _recipe(run: dict[str, Any]) -> list[str]:
    rows = ["| setting | value |", "|---|---|"]
    recipe, stage = dict(run["recipe"]), run["recipe"]["stage"]
    done = run.get("steps_done", recipe["steps"])  # records of earlier versions do not tell
    if done < recipe["steps"]:
        recipe["steps"] = f"{done} of {recipe['steps']}, where the run was stopped"
    for key, words in _RECIPE_WORDS.items():
        # Records of versions before the acceptance loss lack its settings.
        plain = key.startswith("acceptance_") and not recipe.get("acceptance_weight")
        if stage in _STAGES_OF.get(key, (stage,)) and not plain:
            rows.append(f"| {words} | {recipe[key]} |")
    return [*rows, f"| seconds on {run['ranks']} × {run['device']} | {run['seconds']:.0f} |"]


def acceptance_table(evaluation: dict[str, Any], slots: int | None = None) -> list[str]:
    """Accept length and acceptance a slot, a row for each domain and temperature; `slots` columns,
    those of the evaluation if not told."""
    slots = evaluation["verify_width"] - 1 if slots is None else slots
    head = " | ".join(str(k + 1) for k in range(slots))
    rows = [
        f"| domain | T | prompts | accept length | slot {head} |",
        "|---|---|---|---|" + "---|" * slots,
    ]
    for entry in evaluation["domains"]:
        shares = [f"{share:.2f}" for share in entry["slots"]]
        shares = " | ".join(shares + [""] * (slots - len(shares)))
        rows.append(
            f"| {entry['domain']} | {entry['temperature']:g} | {entry['prompts']} | "
            f"{entry['accept_length']:.2f} | {shares} |"
        )
    return rows


def draw_curves(path: Path, runs: list[dict[str, Any]]) -> bool:
    """A picture of the runs' losses and accept lengths; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    shown = (
        (left, "loss", ""),
        (right, "accept_length", ""),
        (right, "sampled_accept_length", ", T = 1"),
    )
    for run in runs:
        name = run["recipe"]["stage"]
        for axis, key, heat in shown:
            if run["curves"].get(key):
                axis.plot(*zip(*run["curves"][key]), label=name + heat)
    for axis, words in ((left, "loss"), (right, "accept length, held-out text")):
        axis.set(xlabel="step", ylabel=words)
        if axis.lines:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _flag(name: str, value: Any) -> str:
    """An engine argument as a server's flag."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"
