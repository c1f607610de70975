"""FLASHMAP: speculative decoding with a flow-map drafter, native to this fork.

A step of a decode batch (``worker.py`` reads as its outline):

1. ``drafter.py`` drafts one block of ``K`` tokens per request in one pass of a small DiT that
   jumps from Gaussian noise to the block, conditioned on the target's hidden states (written to
   the draft KV pool as they were committed) and on the last verified token, the anchor.
2. The target verifies the anchor and the first ``γ ≤ K`` drafts in one forward of ``W = γ + 1``
   rows per request.
3. ``verify.py`` keeps the longest prefix the target accepts and one token of the target's own:
   exactly the target's greedy text, or exactly its sampling distribution.
4. The hidden states of the accepted rows become draft context; the target's own token is the next
   anchor.
"""
