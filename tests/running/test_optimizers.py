"""Which parameters go where, clipping, and a learning rate that a captured step reads."""

import pytest
import torch
from runs import make

import train
from model import ModelConfig
from muon import Muon
from running.optimizers import clip_and_reduce, flat_gradient, make_optimizers, set_rate
from running.processes import Processes
from running.settings import TrainConfig


def test_parameters_go_to_their_optimizers():
    model = train.build(ModelConfig(vocab_size=64, n_layer=2, n_embd=32, n_head=2, n_kv_head=1,
                                    head_dim=16, n_hidden=64, n_channels=2))
    muon, adamw = make_optimizers(model, TrainConfig())
    names = {id(p): n.removesuffix(".weight") for n, p in model.named_parameters()}
    sets = [{names[id(p)] for p in g["params"]} for g in (*muon.param_groups, *adamw.param_groups)]
    assert sets[0] == {n for n in names.values() if n.endswith(
        ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", ".router"))}
    assert sets[1] == {n for n in names.values() if n.endswith(".proj")} and len(sets[1]) == 2
    assert sets[2] == set(names.values()) - sets[0] - sets[1] and "embed" in sets[2]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]


def test_what_is_frozen_stays_as_it_is(folder, monkeypatch):
    """Weight decay changes no weight that needs no gradient."""
    trainer = make(folder, monkeypatch, max_iters=2)
    frozen = [trainer.model.blocks[0].up_proj.weight, trainer.model.kv_pool.value.proj]
    before = [p.detach().clone() for p in frozen]
    for p in frozen:
        p.requires_grad_(False)
        p.grad = None
    trainer.flat = flat_gradient(trainer.model)
    trainer.optimizers = make_optimizers(trainer.model, trainer.c)
    trainer.optimizer_step = train.make_optimizer_step(trainer.fast, trainer.optimizers)
    trainer.run()
    assert all(map(torch.equal, frozen, before)) and trainer.step == 2


def test_clipping_is_local_and_sees_all_micro_steps(monkeypatch):
    local = [torch.tensor([10.0, 0.0]), torch.tensor([0.0, 0.5])]
    clipped = [g.clone() for g in local]
    for g in clipped:
        clip_and_reduce(g, 1.0, Processes())
    for rank in (0, 1):  # the sum adds what the other process has

        def add_other(self, x, other=1 - rank):
            return x.add_(clipped[other] if x.dim() else local[other].norm())

        monkeypatch.setattr(Processes, "sum", add_other)
        mine = local[rank].clone()
        norm = clip_and_reduce(mine, 1.0, Processes(rank, 2))
        torch.testing.assert_close(mine, (local[0] / 10 + local[1]) / 2)
        assert norm == pytest.approx(5.25)
    g = torch.tensor([3.0, 4.0])
    assert clip_and_reduce(g, 0.0, Processes()) == 5 and g.tolist() == [3.0, 4.0]


def test_a_learning_rate_may_be_a_tensor():
    """As a captured step needs it."""
    torch.manual_seed(0)
    start, grad = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    results = []
    for lr in (0.5, torch.tensor(0.5)):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, g in zip(params, grad):
            p.grad = g.clone()
        optimizers = [Muon(params[:2], lr), torch.optim.AdamW(params[2:], lr)]
        for _ in range(3):
            set_rate(optimizers, 0.02)
            for optimizer in optimizers:
                optimizer.step()
        assert all(g["lr"] is lr or not torch.is_tensor(lr)
                   for o in optimizers for g in o.param_groups)
        results.append(torch.stack(params).detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
    assert (results[0] - start).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_optimizer_step_is_the_eager_one():
    from kernels import accelerate
    results = []
    for compile in (False, None):
        torch.manual_seed(0)
        model = train.build(ModelConfig(vocab_size=64, n_layer=2, n_embd=32, n_head=2, n_kv_head=1,
                                        head_dim=16, n_hidden=64, n_channels=2)).cuda()
        flat, optimizers = train.flat_gradient(model), make_optimizers(model, TrainConfig())
        fast = accelerate(model, torch.float32, compile, training=True)
        step = train.make_optimizer_step(fast, optimizers)
        for i in range(6):  # eager, captured, replayed
            flat.copy_(torch.randn_like(flat))
            set_rate(optimizers, 1e-2 / (i + 1))
            step(flat.norm())
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
