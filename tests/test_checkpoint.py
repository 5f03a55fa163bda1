"""Checkpoints: never half of one, and whatever is loaded is looked at first."""

import errno
from pathlib import Path

import pytest
import torch
from runs import TINY, in_process, load
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from baselines import build
from configurator import UserError
from model import Decoder, ModelConfig


@pytest.fixture
def state(tmp_path, monkeypatch):
    """What train.py writes, of a model that has learnt nothing, in tmp_path/a."""
    monkeypatch.chdir(tmp_path)
    sizes = {k: v for k, v in TINY.items() if k in ModelConfig.__dataclass_fields__}
    config = ModelConfig(vocab_size=320, eos_id=256, **sizes)
    model = build(config)
    state = {"model": model.state_dict(), "model_config": vars(config), "optimizers": [],
             "meta": {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256},
             "config": {"block_size": 16, "dataset": "x"}, "step": 3}
    checkpoint.save_checkpoint(Path("a/ckpt.pt"), state)
    return state


@pytest.mark.parametrize("fault, words", [
    (OSError(errno.ENOSPC, "no space left"), "no space left.*earlier checkpoint"),
    (RuntimeError("unexpected pos 64"), "is the disk full.*earlier checkpoint")])
def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch, fault, words):
    path = tmp_path / "ckpt.pt"
    checkpoint.save_checkpoint(path, {"a": torch.ones(3)})
    before = path.read_bytes()

    def broken(state, f):
        f.write(b"x" * 100)
        raise fault

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(UserError, match=words):
        checkpoint.save_checkpoint(path, {"a": torch.zeros(3)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_full_disk_leaves_the_old_best_checkpoint(folder, monkeypatch):
    trainer = in_process(folder, monkeypatch, max_iters=1)
    before = {name: Path("out", name).read_bytes() for name in ("best.pt", "ckpt.pt")}

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as disk:
        disk.setattr(torch, "save", refuse)
        with pytest.raises(UserError, match="best.pt: cannot be written .no space left"):
            trainer.save(best=True)
    assert {p.name: p.read_bytes() for p in Path("out").glob("*.pt*")} == before
    trainer.save(best=True)
    Path("out/ckpt.pt").write_bytes(b"an older one, by cp")
    assert load("out/best.pt")["step"] == 1


def test_a_run_that_cannot_be_moved_stays(tmp_path, monkeypatch):
    for name in ("ckpt.pt", "log.csv"):
        (tmp_path / name).write_text(name)

    def refuse(*_):
        raise PermissionError(errno.EACCES, "access denied")

    monkeypatch.setattr(checkpoint.os, "replace", refuse)
    with pytest.raises(UserError, match="cannot be moved.*access denied.*another out_dir"):
        checkpoint.keep_previous(tmp_path)
    assert (tmp_path / "ckpt.pt").read_text() == "ckpt.pt"


def buffer(self):
    self.register_buffer("own", torch.arange(3.), persistent=False)


def attribute(self):
    self.own = torch.arange(3.)


def numbers(self):
    self.own = torch.tensor(torch.arange(3.).numpy().tolist())


def in_a_list(self):
    self.kept = [torch.arange(3.)]
    self.own, = self.kept


def drawn(self):
    self.register_buffer("own", torch.nn.init.ones_(torch.empty(3)).cumsum(0) - 1, False)


def looks_at_it(self):
    assert 0.5 < self.embed.weight.std() < 2  # as nn.Embedding draws it
    self.own = torch.arange(3.)


@pytest.mark.parametrize("make", [buffer, attribute, numbers, in_a_list, drawn, looks_at_it])
def test_a_changed_model_may_make_tensors_that_no_checkpoint_has(make, state, monkeypatch):
    init = Decoder.__init__

    def changed(self, config):
        init(self, config)
        make(self)

    monkeypatch.setattr(Decoder, "__init__", changed)
    model, _ = checkpoint.load_model("a")
    assert model.own.tolist() == [0, 1, 2]
    assert all(torch.equal(v, state["model"][k]) for k, v in model.state_dict().items())


def test_what_a_changed_model_has_made_of_its_weights_holds_for_a_loaded_one(state, monkeypatch):
    init = Decoder.__init__

    def changed(self, config):
        init(self, config)
        self.head = torch.nn.Linear(*self.embed.weight.shape[::-1], bias=False)
        self.head.weight = self.embed.weight
        self.scores = lambda h, w=self.embed.weight: h @ w.T

    monkeypatch.setattr(Decoder, "__init__", changed)
    theirs = state["model"] | {"head.weight": state["model"]["embed.weight"]}
    torch.save(state | {"model": theirs}, "b.pt")
    model, loaded = checkpoint.load_model("b.pt")
    assert model.head.weight is model.embed.weight
    h = torch.randn(2, model.config.n_embd)
    assert torch.equal(model.scores(h), h @ theirs["embed.weight"].T)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert torch.equal(loaded["model"]["embed.weight"], theirs["embed.weight"])


def test_wrapper_prefixes_are_stripped_and_unknown_names_refused(state):
    names = state["model"]
    torch.save(state | {"model": {f"module._orig_mod.{k}": v for k, v in names.items()}}, "b.pt")
    model, _ = checkpoint.load_model("b.pt")
    assert all(torch.equal(v, names[k]) for k, v in model.state_dict().items())
    torch.save(state | {"model": names | {"surprise": torch.zeros(1)}}, "c.pt")
    with pytest.raises(UserError, match="c.pt: weights of other names.*surprise.*earlier version"):
        checkpoint.load_model("c.pt")


def test_a_setting_of_a_changed_model_is_named(state):
    torch.save(state | {"model_config": state["model_config"] | {"n_future": 3}}, "b.pt")
    with pytest.raises(UserError, match="b.pt: a model with n_future, which this version has not"):
        checkpoint.load_model("b.pt")


@pytest.mark.parametrize("part, value, words", [
    ("config", {}, "block_size"), ("meta", {"tokenizer": "bytes"}, "vocab_size"),
    ("config", {"block_size": "16"}, "block_size='16'"),
    ("meta", {"tokenizer": 5, "vocab_size": 257, "eos_id": 256}, "tokenizer=5"),
    ("meta", {"tokenizer": "bytes", "vocab_size": "257", "eos_id": 256}, "vocab_size='257'"),
    ("meta", "x", "TypeError"), ("model_config", {"n_layer": "3"}, "TypeError"),
    ("model_config", [1], "TypeError")])
def test_what_a_checkpoint_lacks_is_named(state, part, value, words):
    torch.save(state | {part: value}, "b.pt")
    with pytest.raises(UserError, match="b.pt: not a checkpoint of train.py.*" + words):
        checkpoint.load_model("b.pt")


@pytest.mark.parametrize("what", [{"kv": "mine"}, {"router": "deep"}], ids=str)
def test_a_checkpoint_of_another_version_s_system_is_not_called_damaged(state, what):
    torch.save(state | {"model_config": state["model_config"] | what}, "b.pt")
    (name, value), = what.items()
    with pytest.raises(UserError, match=f"b.pt: a model with {name}={value}, which this version"):
        checkpoint.load_model("b.pt")


def test_a_loaded_model_draws_no_weights(state):
    """That would take seconds of each command."""
    class Called(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.__name__)
            return function(*args, **kwargs or {})

    with Called() as called:
        checkpoint.load_model("a")
    assert called.names and not [n for n in called.names if "normal" in n or "uniform" in n]


@pytest.mark.parametrize("n_embd, said", [
    (48, ".*size mismatch for embed.weight"), (10**9, "a model of its sizes does not fit into")])
def test_sizes_that_the_weights_have_not_are_said(state, n_embd, said):
    torch.save(state | {"model_config": state["model_config"] | {"n_embd": n_embd}}, "b.pt")
    with pytest.raises(UserError, match=f"b.pt: {said}"):
        checkpoint.load_model("b.pt")


def test_a_loaded_model_is_in_float32_whatever_the_file_has(state):
    half = {name: x.bfloat16() for name, x in state["model"].items()}
    torch.save(state | {"model": half}, "b.pt")
    model, _ = checkpoint.load_model("b.pt")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_flipped_bit_is_noticed(state):
    content = bytearray(Path("a/ckpt.pt").read_bytes())
    content[len(content) // 2] ^= 4
    Path("without_ending").write_bytes(content)
    with pytest.raises(UserError, match="without_ending: not a checkpoint of train.py, or damaged"):
        checkpoint.load_model("without_ending")


def test_no_memory_is_no_damage(state, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(RuntimeError, match="not enough memory"):
        checkpoint.load_checkpoint("a")


def test_a_checkpoint_holds_tensors_and_plain_values_only(folder, monkeypatch):
    in_process(folder, monkeypatch, max_iters=1)
    state = load("out/ckpt.pt")
    assert state["step"] == 1 and type(state["optimizers"][0]["param_groups"][0]["lr"]) is float


def test_the_best_checkpoint_alone_is_a_run_that_is_kept(tmp_path):
    (tmp_path / "best.pt").write_bytes(b"best")
    (tmp_path / "log.csv").write_text("step\n")
    assert checkpoint.keep_previous(tmp_path) == tmp_path / "previous"
    assert (tmp_path / "previous" / "best.pt").read_bytes() == b"best"
    assert not (tmp_path / "log.csv").exists()
    (tmp_path / "log.csv").write_text("step\n")
    assert checkpoint.keep_previous(tmp_path) is None


def test_the_log_of_a_run_that_came_to_no_checkpoint_is_kept(tmp_path):
    """It alone tells where a run diverged."""
    (tmp_path / "log.csv").write_text("step\n0\n")
    assert checkpoint.keep_previous(tmp_path) == tmp_path / "previous"
    assert (tmp_path / "previous/log.csv").read_text() == "step\n0\n"
