"""
Muon: momentum whose matrices are made nearly orthogonal before each step (section 4.1).
"""

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, matrices of one shape in one batch.

    The orthogonalised update (5 Newton-Schulz steps, singular values about 0.7 to 1.2, those below
    0.0015 of the norm less) is scaled by 0.2 sqrt(max(rows, columns)), `match_rms_adamw`, so that
    AdamW's learning rate serves. Decay is decoupled: lr * weight_decay. Parameters without a
    gradient are left alone. The learning rate may be a tensor, so that a step can be captured in a
    CUDA graph.
    """

    def __init__(self, params, lr: float = 3e-4, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads = [p.grad for p in params]
                for p in params:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                updates = torch._foreach_lerp(grads, buffers, group["momentum"])
                updates = orthogonalise(torch.stack(updates)).to(params[0].dtype)
                updates = updates * (-0.2 * max(shape) ** 0.5 * group["lr"])
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates.unbind()))


def orthogonalise(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a batch of matrices (n, rows, columns)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    # bfloat16 is enough and fast on a GPU; many CPUs have no fast bfloat16 product
    x = x.bfloat16() if x.is_cuda else x
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
