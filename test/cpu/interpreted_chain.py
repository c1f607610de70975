"""Runs upstream's chain sampler, a Triton kernel, under Triton's interpreter.

A process of its own, because TRITON_INTERPRET has to be set before Triton is first imported:
`python interpreted_chain.py CALLS RESULTS` loads a list of keyword arguments, makes the calls and
saves the list with the outputs written.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

calls = torch.load(sys.argv[1])
for call in calls:
    chain_speculative_sampling_triton.__wrapped__(**call)
torch.save(calls, sys.argv[2])
