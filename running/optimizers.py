"""
Who trains what: Muon and AdamW, the one gradient buffer that they read, and the learning rate.
"""

import torch
from torch import Tensor

from model import Decoder
from muon import Muon
from running.processes import Processes
from running.settings import TrainConfig


def matrices(model: Decoder) -> set[str]:
    """Names of what Muon trains: the weights of nn.Linear, the blocks' and the routers'."""
    return {f"{name}.weight" for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)}


def make_optimizers(model: Decoder, c: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' and routers' matrices, AdamW for all else (section 4.1).

    On CUDA the learning rate is a tensor, which a step in a CUDA graph reads anew.
    """
    names, muon, projections, rest = matrices(model), [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:  # frozen: weight decay would change it, too
            continue
        if name in names:
            muon.append(p)
        else:
            (projections if name.endswith(".proj") else rest).append(p)
    groups = [{"params": projections, "weight_decay": c.weight_decay},
              {"params": rest, "weight_decay": 0.0}]
    device, lr = model.embed.weight.device, c.learning_rate
    on_cuda = device.type == "cuda"
    if on_cuda:
        lr = torch.tensor(lr, device=device)
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr, (c.beta1, c.beta2),
                              fused=on_cuda, capturable=on_cuda)
    return [Muon(muon, lr, c.momentum, c.weight_decay), adamw]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float):
    """The learning rate of the next step; on CUDA into the tensors that its graph reads."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def flat_gradient(model: Decoder) -> Tensor:
    """Give every parameter that is trained a gradient that is a view into one buffer, and return
    the buffer."""
    params = [p for p in model.parameters() if p.requires_grad]
    flat = params[0].new_zeros(sum(p.numel() for p in params))
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.grad = piece.view_as(p)
    return flat


def clip_and_reduce(flat: Tensor, grad_clip: float, processes: Processes) -> Tensor:
    """Clip this process's gradient to norm grad_clip, then average over processes (in place).

    Returns the mean over processes of the norms before clipping. Once per step, after all
    micro-steps, as the paper does it: the average need not have norm grad_clip.
    """
    norm = flat.norm()
    if grad_clip > 0:
        flat.mul_((grad_clip / (norm + 1e-6)).clamp(max=1.0))
    if processes.world > 1:
        processes.sum(flat).div_(processes.world)
        norm = processes.sum(norm.clone()) / processes.world
    return norm
