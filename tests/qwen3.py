"""Hugging Face's names of vanilla's weights, which their Qwen3 computes with."""

import torch
from torch import Tensor

from model import Decoder

QWEN3_PARTS = {  # of a block, ours and theirs
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    **{part: f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm",
                                              "k_norm")},
    **{part: f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}}


def qwen3_names(n_layer: int) -> dict[str, str]:
    """Our names of the weights of a vanilla model, and theirs."""
    return {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"} | {
        f"blocks.{n}.{ours}.weight": f"model.layers.{n}.{theirs}.weight"
        for n in range(n_layer) for ours, theirs in QWEN3_PARTS.items()}


def from_qwen3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a Hugging Face Qwen3 state dict to ours; the tied head is dropped.

    Raises ValueError for what such a model, with a tied head, does not have, or lacks.
    """
    ours = {theirs: name for name, theirs in qwen3_names(len(state)).items()}
    for name in (name for name in state if name not in ours):
        if name != "lm_head.weight":
            raise ValueError(f"{name}: not a parameter of a dense Qwen3 model")
        if not torch.equal(state[name], state.get("model.embed_tokens.weight", state[name])):
            raise ValueError(f"{name}: not the embedding, but only a tied head is possible")
    if "model.embed_tokens.weight" not in state:
        raise ValueError("no model.embed_tokens.weight: not a Qwen3 model")
    return {ours[name]: tensor for name, tensor in state.items() if name in ours}


def to_qwen3(model: Decoder) -> dict[str, Tensor]:
    """The state dict of a vanilla model under the names of Hugging Face's Qwen3, head included.
    Raises ValueError for another system, which that would compute as vanilla."""
    if model.config.kv != "vanilla":
        raise ValueError(f"kv={model.config.kv}: only vanilla is a Qwen3 model")
    state = model.state_dict()
    theirs = qwen3_names(len(state))
    return {"lm_head.weight": state["embed.weight"]} | {
        theirs[name]: tensor for name, tensor in state.items()}
