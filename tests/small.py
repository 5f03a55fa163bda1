"""Small float64 models with every part active, for the tests of the mathematics."""

import torch

from baselines import build
from model import ModelConfig

# all sizes differ, so that no two dimensions can be mixed up unnoticed; D is not H * d
SMALL = dict(vocab_size=13, eos_id=0, n_layer=3, n_embd=8, n_head=4, n_kv_head=2, head_dim=6,
             n_hidden=10, n_channels=3, router_stride=2)


def small_model(seed=0, dtype=torch.float64, **changes):
    """A model whose gains, router weights, biases and dummy are all random and far from trivial."""
    model = build(ModelConfig(**{**SMALL, **changes})).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for full_name, p in model.named_parameters():
        name = full_name.removesuffix(".weight")
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            value = 1 + 0.3 * noise
        elif name.endswith(("embed", "dummy", "bias")):
            value = noise
        else:
            value = noise / p.size(-1) ** 0.5
        with torch.no_grad():
            p.copy_(value)
    return model


def random_tokens(B, T, seed=1, low=1, vocab_size=SMALL["vocab_size"]):
    """Token ids (B, T); with low=1 no EOS (id 0) is among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, vocab_size, (B, T), generator=generator)


def with_documents(idx, *ends):
    """The same ids with an EOS where the documents of each row end."""
    idx = idx.clone()
    for row, columns in zip(idx, ends):
        row[list(columns)] = 0
    return idx


def channels(cache):
    """Keys and values of a cache, (C, B, S, Hkv, d) each."""
    return torch.stack(tuple(cache.k)), torch.stack(tuple(cache.v))
