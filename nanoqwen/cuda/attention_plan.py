"""Which of prefill's two attention kernels takes a chunk, and how each is launched. Needs no card.

``prefill_attention`` (kernels/prefill/attention.cu) gives a CTA 128 queries of a head and all the tokens before them. That is the least work,
but few queries make few CTAs: 32 tokens of the 7B are 28, each with the whole context to walk while four fifths of the card have nothing.
``prefill_attention_spread`` gives 64 queries to a cluster of four CTAs, a quarter of the context each, and joins their results.

The choice compares the walk of the busiest SM. Its unit is a step of the plain kernel: 64 tokens of keys and values against 128 queries. A step against
64 queries takes not half of that but most of it: the tensor cores have half as much to do, and the step waits longer for itself.
"""

from __future__ import annotations

from nanoqwen.config import Dims, load_settings

PLAIN, SPREAD = "prefill_attention", "prefill_attention_spread"
ATTENTIONS = (PLAIN, SPREAD)
#: kernels/prefill/attention_steps.cuh and attention_tile.cuh: threads of a CTA, stages of the ring, tokens of a step, CTAs of a cluster.
ATTENTION_THREADS, STAGES, STEP, CLUSTER = 384, 4, 64, 4
#: Queries of a CTA, or of a cluster.
TILE = {PLAIN: 128, SPREAD: 64}
#: A step, and what a CTA takes besides its steps (starting and filling the ring; and, spread, waiting for the cluster and joining), both in steps of
#: the plain kernel. Fitted to times of the 7B on an H200, from 16 tokens on nothing to 512 on 16,000 (tests/unit/test_prefill_attention.py has them).
A_STEP = {PLAIN: 1.0, SPREAD: 0.8}
BESIDES = {PLAIN: 0.25, SPREAD: 4.5}


def attention_grid(kernel: str, dims: Dims, length: int) -> tuple[int, ...]:
    """The grid for a launch of ``length`` tokens; it depends on nothing else."""
    return (dims.num_heads, -(-length // TILE[kernel]), *((CLUSTER,) if kernel == SPREAD else ()))


def attention_shared_bytes(dims: Dims) -> int:
    """Dynamic shared memory of a CTA of either kernel: the ring of keys and values, and its barriers (AttentionShared)."""
    return STAGES * 2 * STEP * dims.head_dim * load_settings().kv.value_bytes + 4 * STAGES * 8


def steps_of_busiest(kernel: str, dims: Dims, length: int, position: int, sms: int) -> float:
    """Steps of the plain kernel that the SM with most to do spends on ``length`` tokens at ``position``, as if every tile were as long as the last.

    A cluster's quarter of the steps is not rounded up: then more context can only speak for spreading, never against it.
    """
    grid = attention_grid(kernel, dims, length)
    share = CLUSTER if kernel == SPREAD else 1
    rounds, steps = -(-grid[0] * grid[1] * share // sms), -(-(position + length) // STEP)
    return rounds * (BESIDES[kernel] + A_STEP[kernel] * steps / share)


def attention_kernel(dims: Dims, length: int, position: int, sms: int) -> str:
    """The kernel for a chunk of ``length`` tokens whose first stands at ``position``, on a card of ``sms`` SMs."""
    return min(ATTENTIONS, key=lambda kernel: steps_of_busiest(kernel, dims, length, position, sms))
