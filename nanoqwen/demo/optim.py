"""Muon for the matrices inside the layers, AdamW for embedding, head, norms and biases; one learning-rate schedule for both.

Muon replaces the gradient of a matrix by the nearest matrix with orthogonal rows or columns, so that no direction of the weight is
left behind because its gradient is small (Jordan et al., 2024). Scaled by 0.2 sqrt(max(rows, columns)) its step has the size of an
AdamW step (Liu et al., 2025, "Muon is scalable for LLM training"), and one learning rate serves both.
"""

from __future__ import annotations

import math

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic; it need not converge, singular values near 1 suffice


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The orthogonal factors of a stack [count, rows, columns], about, by Newton-Schulz iteration in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are stepped together. Weight decay is decoupled."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        params = list(params)
        shapes = sorted({tuple(p.shape) for p in params})
        groups = [{"params": [p for p in params if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params, momentum = group["params"], group["momentum"]
            gradient = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            buffer = state["momentum"].lerp_(gradient, 1 - momentum)
            update = orthogonalise(gradient.lerp(buffer, momentum)).float() * (0.2 * math.sqrt(max(gradient.shape[1:])))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"])


def optimisers(net, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW] over the parameters of a Qwen2. One-dimensional parameters do not decay."""
    named = dict(net.named_parameters())
    inner = [p for name, p in named.items() if name.endswith("_proj.weight")]
    outer = [p for name, p in named.items() if p.dim() == 2 and not name.endswith("_proj.weight")]
    flat = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": outer, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
    fused = outer[0].is_cuda
    return [Muon(inner, lr, weight_decay=weight_decay), torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)]


def learning_rate(step: int, steps: int, decay: float, warmup: int) -> float:
    """Factor on the peak rate: linear warm-up, constant, then linear to zero over the last `decay` share of the steps."""
    return min((step + 1) / warmup, 1.0, (steps - step) / (steps * decay))
