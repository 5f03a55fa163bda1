"""The door: what is switched on, and that a changed model never gets another one's results."""

import pytest
import torch
from small import random_tokens
from small import small_model as smaller_model

import decoding
import kernels
from baselines import Feedback, NoFeedback, Recurrent
from configurator import UserError
from kernels import accelerate, known
from model import Block, Decoder
from pool import Branch, WhiteMatter
from solvers import solve


def small_model(**options):
    """Of sizes that the kernels take."""
    return smaller_model(**dict(head_dim=16, n_embd=16) | options)


def test_the_kernels_know_the_code_that_they_stand_for():
    """If it has changed along with them: python -m kernels.known prints the new fingerprints."""
    assert known.changed() == set()
    assert known.PARTS.keys() == known.FINGERPRINTS.keys()
    assert known.unknown(small_model()) == known.unknown(small_model(kv="vanilla")) == set()
    for kv in ("nofeedback", "feedback", "recurrent", "fusedkv"):
        assert known.unknown(small_model(kv=kv)) == {"decoding"}


def more(self, a):
    return a + 1


@pytest.mark.parametrize("owner, name, part", [
    (Block, "mlp", "block"), (Decoder, "logits", "loss"), (Branch, "weights", "pool"),
    (WhiteMatter, "attend", "decoding"), (decoding, "choose", "choice")])
def test_what_is_replaced_on_a_class_is_noticed(owner, name, part, monkeypatch):
    """As one does in a notebook."""
    monkeypatch.setattr(owner, name, more)
    assert known.unknown(small_model()) == {part}


def test_comments_and_layout_are_not_a_change_and_code_is():
    code = 'def f(x):\n    """Twice."""\n    return 2 * x\n'
    same = 'def f(x):  # twice\n\n    """More words."""\n    return 2  *  x\n'
    assert known.essence(code) == known.essence(same)
    assert known.essence(code) != known.essence(code.replace("2 *", "3 *"))
    assert known.essence(code) == known.essence("    " + code.replace("\n", "\n    "))
    code = "def f(x):\n    if x:\n        x = 1\n        x = 2\n    return x\n"
    assert known.essence(code) != known.essence(code.replace("        x = 2", "    x = 2"))


class Gelu(Block):
    """Another MLP."""

    def mlp(self, a):
        return self.down_proj(torch.nn.functional.gelu(self.gate_proj(a)) * self.up_proj(a))


class Mean(WhiteMatter):
    """Another pool."""

    def pool(self, h, rows):
        k, v = super().pool(h, rows)
        return k, v - v.mean(0)


class Half(Recurrent):
    """Another attention."""

    def attend(self, *args):
        return super().attend(*args) / 2


class Sink(Feedback):
    """Another cache."""

    def new_cache(self, *args, **options):
        return super().new_cache(*args, **options)


class Doubled(NoFeedback):
    """Another channel."""

    def channel(self, *args):
        return tuple(2 * x for x in super().channel(*args))


def test_a_changed_norm_attention_channel_or_cache_is_noticed():
    model = small_model()
    model.norm = torch.nn.LayerNorm(16)
    assert "loss" in known.unknown(model)
    for kv, changed, part in (("recurrent", Half, "recurrent"), ("feedback", Sink, "attention"),
                              ("nofeedback", Doubled, "no feedback")):
        model = small_model(kv=kv)
        model.__class__ = changed
        assert part in known.unknown(model)


def test_a_changed_model_is_noticed():
    model = small_model()
    model.blocks[1].__class__ = Gelu
    assert known.unknown(model) == {"block"}
    model = small_model()
    model.__class__ = Mean
    assert known.unknown(model) == {"pool", "decoding"}
    model = small_model()
    model.kv_pool.key.router = torch.nn.Sequential(model.kv_pool.key.router, torch.nn.Tanh())
    assert known.unknown(model) == {"pool"}
    model = small_model(kv="vanilla")
    model.loss = lambda h, targets: Decoder.loss(model, h, targets) * 2
    assert known.unknown(model) == {"loss"}


def plus_one(module, args, out):
    return out + 1


@pytest.mark.parametrize("part, change", [
    ("block", lambda m: setattr(m.blocks[1], "mlp", lambda a: a)),
    ("block", lambda m: setattr(m.blocks[1], "attn_norm", torch.nn.LayerNorm(m.config.n_embd))),
    ("block", lambda m: setattr(m.blocks[1], "q_proj", torch.nn.Sequential(m.blocks[1].q_proj))),
    ("block", lambda m: setattr(m.blocks[1], "down_proj", torch.nn.Linear(
        m.config.n_hidden, m.config.n_embd))),  # with a bias
    ("block", lambda m: m.blocks[1].down_proj.register_forward_hook(plus_one)),
    ("block", lambda m: m.blocks.pop(1)),
    ("loss", lambda m: m.embed.register_forward_hook(plus_one)),
    ("loss", lambda m: m.register_forward_pre_hook(lambda *args: None)),
    ("pool", lambda m: setattr(m.kv_pool, "forward", lambda *args: None)),
    ("decoding", lambda m: setattr(m, "attend", lambda *args: None))])
def test_what_is_changed_on_an_instance_is_noticed(part, change):
    model = small_model()
    change(model)
    assert known.unknown(model) == {part}


def test_sizes_that_no_kernel_takes_are_noticed():
    assert known.unknown(small_model(n_embd=24)) == {"pool"}
    assert known.unknown(small_model(n_layer=33, n_channels=2)) == {"pool"}
    for d in (8, 24, 40, 112):
        assert known.unknown(small_model(head_dim=d)) == {"attention"}
    assert known.unknown(small_model(n_head=17, n_kv_head=1)) == {"attention"}
    assert known.unknown(small_model(n_head=16, n_kv_head=1)) == set()
    for d in (16, 32, 48, 80, 96, 128):
        assert known.unknown(small_model(head_dim=d)) == set()


def test_on_a_cpu_it_is_the_plain_model():
    model = small_model(dtype=torch.float32)
    fast = accelerate(model, torch.float32)
    assert fast.model is model and fast.decoding is decoding.Decoding
    assert str(fast) == "float32, plain PyTorch, not compiled"
    step = len
    assert fast.graphed(step) is step
    fast.after_backward()
    fast.after_step()
    assert accelerate(model, torch.bfloat16).model.norm.weight.dtype == torch.bfloat16


def test_training_in_bfloat16_is_autocast():
    model, idx = small_model(dtype=torch.float32), random_tokens(2, 5)
    fast = accelerate(model, torch.bfloat16, training=True)
    with fast.autocast():
        assert fast.model.logits(solve(fast.model, idx).final).dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(kernels, "compiler", lambda: False)
    with pytest.raises(UserError, match="no C compiler.*--compile=false"):
        accelerate(small_model(), torch.float64, compile=True)
