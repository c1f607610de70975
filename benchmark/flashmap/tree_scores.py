"""How many drafts a verify tree gets accepted, by how its nodes are chosen; on a CPU, no server.

`collect` lets the target write texts and drafts a block after every third of their tokens with the
`flashmap` package (draws of noise that differ in nothing else), keeping the likeliest tokens of
each slot. `report` plans trees from them with the server's planners and walks each along its text,
which is what the greedy rule and, on sampled texts, the rule that follows the target's draws do.
Chains of sampled requests are served by rejection, which accepts more than this walk.

    python benchmark/flashmap/tree_scores.py collect --target DIR --draft DIR
    python benchmark/flashmap/tree_scores.py report
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.flashmap.slot_choices import slot_choices
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree
from sglang.kernels.ops.speculative.flashmap.tree_walk import walk_tree

KEPT = 64  # tokens of a slot
CHOICES = 8
SAMPLING = 0.5  # temperature of sampled candidates
PROMPTS = Path(__file__).resolve().parents[2] / "scripts/train/heldout.jsonl"


@dataclass(frozen=True)
class Anchor:
    """One draft: `lp` and `ids (N, K, KEPT)`, and the `K` tokens of the text that follow."""

    temperature: float
    truth: torch.Tensor
    lp: torch.Tensor
    ids: torch.Tensor

    def logits(self, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(1, N, K, V)` over the tokens that occur, and their ids `(V,)`."""
        ids, columns = self.ids[:draws].unique(return_inverse=True)
        wide = torch.full((*columns.shape[:2], len(ids)), float("-inf"))
        return wide.scatter_(2, columns, self.lp[:draws])[None], ids


def collect(args: argparse.Namespace) -> None:
    from flashmap.modeling_flashmap import FlashMapCache, FlashMapDraftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    draft = FlashMapDraftModel.from_pretrained(args.draft, dtype=torch.float32).eval()
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    slots, draws = draft.config.block_size, max(args.draws)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    prompts = prompts[:: max(len(prompts) // args.count, 1)][: args.count]
    anchors = []
    for temperature in args.temperatures:
        sampling = dict(do_sample=False)
        if temperature > 0:
            sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
        for prompt in prompts:
            message = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            text = target.generate(
                ids, max_new_tokens=args.tokens, attention_mask=torch.ones_like(ids), **sampling
            )
            with draft.target_features(target) as features:
                target.model(text)
                hidden = features()
            cache = FlashMapCache(draft.config, draws, text.shape[1] + 1)
            draft.extend_context(cache, hidden.expand(draws, -1, -1))
            # Backwards: a draft overwrites the context at its anchor.
            for at in range(text.shape[1] - slots - 1, ids.shape[1] - 1, -3):
                cache.length = at
                logits = draft.draft(text[:, at].expand(draws), cache, embed, head)
                lp, kept = logits.log_softmax(dim=-1).topk(KEPT, dim=-1)
                truth = text[0, at + 1 : at + 1 + slots].clone()
                anchors.append(dict(T=temperature, truth=truth, lp=lp, ids=kept))
            print(f"T={temperature:g} {len(anchors)} drafts: {prompt[:60]}", flush=True)
    torch.save(anchors, args.data)


def plans(anchor: Anchor, draws: int, width: int) -> dict[str, TreePlan]:
    """The tree of each way to choose its nodes."""
    root, no_chain = torch.zeros(1, dtype=torch.int64), torch.tensor([False])
    lp, ids = anchor.lp[:draws], anchor.ids[:draws]
    first = ids[None, :, :, 0].contiguous()
    picks = (lp / SAMPLING).softmax(dim=-1).flatten(0, 1).multinomial(1).view(*ids.shape[:2], 1)
    sampled = ids.gather(2, picks)[None, ..., 0].contiguous()
    scores = lp.gather(2, picks)[None, ..., 0].cumsum(dim=-1).exp()
    logits, columns = anchor.logits(draws)
    temperature = torch.tensor([anchor.temperature])
    tokens, probs = slot_choices(logits, columns, temperature, min(CHOICES, len(columns)))
    return {
        "chain": plan_tree(root, first, width, ~no_chain),
        "votes, likeliest": plan_tree(root, first, width, no_chain),
        "votes, sampled": plan_tree(root, sampled, width, no_chain),
        "votes and scores": plan_tree(root, sampled, width, no_chain, scores=scores),
        "grown": grow_tree(root, tokens, probs, first[:, 0], width, no_chain),
    }


def report(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    anchors = [
        Anchor(row["T"], row["truth"], row["lp"], row["ids"])
        for row in torch.load(args.data, weights_only=True)
    ]
    for temperature in sorted({anchor.temperature for anchor in anchors}):
        chosen = [anchor for anchor in anchors if anchor.temperature == temperature]
        print(f"T={temperature:g}, {len(chosen)} drafts, accepted drafts at each")
        for draws in args.draws:
            blocks = [len(anchor.ids[:draws, :, 0].unique(dim=0)) for anchor in chosen]
            print(f"  {draws} draws, {sum(blocks) / len(blocks):.2f} distinct likeliest blocks")
            for width in args.widths:
                total: dict[str, int] = {}
                for anchor in chosen:
                    slots = len(anchor.truth)
                    follows = torch.cat((anchor.truth, torch.tensor([-1])))
                    for name, plan in plans(anchor, draws, width).items():
                        links = plan.tokens, plan.first_child, plan.next_sibling
                        after = follows[plan.depths.long()]
                        _, correct, *_ = walk_tree(*links, after, after[:, 0], slots + 1)
                        total[name] = total.get(name, 0) + int(correct)
                means = (f"{name} {value / len(chosen):.2f}" for name, value in total.items())
                print(f"    W={width}: {'; '.join(means)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["collect", "report"])
    parser.add_argument("--data", type=Path, default=Path("out/tree_scores.pt"))
    parser.add_argument("--target", type=Path, help="folder of the target")
    parser.add_argument("--draft", type=Path, help="folder of the draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL with `prompt`")
    parser.add_argument("--count", type=int, default=14, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[9, 17, 33])
    args = parser.parse_args()
    if args.step == "collect" and not (args.target and args.draft):
        parser.error("collect needs --target and --draft")
    args.data.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        (collect if args.step == "collect" else report)(args)


if __name__ == "__main__":
    main()
