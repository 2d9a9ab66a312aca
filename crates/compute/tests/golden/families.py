"""Losses and gradients of tiny random models of every family, from PyTorch in float64 and float32.

Run: python families.py (torch, transformers, numpy). Writes NAME.json (the Hugging Face config) and
NAME.bin, little-endian: loss and gradients in float64, then loss (as float64) and gradients in
float32; gradients of all tensors in the order of `LayerTable`, of the mean loss over the B * (S - 1)
targets; the losses are sums.

Weights are exact in float32 and made by `uniform`, so they need no file. transformers computes
norms and rotary angles in float32 whatever the model's type: for the float64 model both are
replaced by the same formulas in float64.
"""

import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

ROWS, SEQ_LEN = 2, 13
HERE = pathlib.Path(__file__).parent
BASE = dict(
    vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MODELS = {
    "llama_tied": dict(model_type="llama", tie_word_embeddings=True, rope_theta=10000.0),
    "llama_untied": dict(
        model_type="llama", tie_word_embeddings=False, rope_theta=500.0, rope_scaling=LLAMA3),
    "llama_bias": dict(
        model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
        rope_theta=10000.0),
    "mistral": dict(model_type="mistral", tie_word_embeddings=False, rope_theta=10000.0,
                    sliding_window=None, head_dim=6),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=False, rope_theta=1000000.0, head_dim=8),
}


def splitmix64(x):
    """The SplitMix64 generator's output function (Steele, Lea, Flood 2014), elementwise."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(layer, count):
    """`count` multiples of 2^-17 in [-1/4, 1/4)."""
    keys = (np.uint64(layer) << np.uint64(40)) + np.arange(count, dtype=np.uint64)
    return (splitmix64(keys) >> np.uint64(48)).astype(np.float64) / 131072 - 0.25


def layers(config, names):
    order = [
        "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
        "self_attn.v_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias",
        "self_attn.v_proj.bias", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
        "self_attn.o_proj.weight", "self_attn.o_proj.bias", "post_attention_layernorm.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias",
    ]
    table = [["model.embed_tokens.weight"]]
    for i in range(config.num_hidden_layers):
        table.append([f"model.layers.{i}.{n}" for n in order])
    table.append(["model.norm.weight", "lm_head.weight"])
    return [[n for n in layer if n in names] for layer in table]


def inverse_frequencies(raw, head_dim):
    theta = raw["rope_theta"]
    freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    scaling = raw.get("rope_scaling")
    if scaling:
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return freq


def make_exact(model, raw, head_dim):
    """Norms and rotary angles in float64."""
    freq = inverse_frequencies(raw, head_dim)
    rotary = model.model.rotary_emb
    assert torch.allclose(rotary.inv_freq.double(), freq, rtol=1e-6), "another rope formula"

    def angles(x, position_ids):
        angle = position_ids[..., None].double() * freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    rotary.forward = angles
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            def norm(x, module=module):
                eps = module.variance_epsilon
                return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            module.forward = norm


def run(raw, dtype):
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    # `to` also casts the rotary buffer; float32 is what transformers computes with.
    parameters = dict(model.named_parameters())
    table = layers(config, parameters)
    assert sorted(parameters) == sorted(sum(table, []))
    for index, names in enumerate(table):
        values = uniform(index, sum(parameters[n].numel() for n in names))
        start = 0
        for name in names:
            p = parameters[name]
            part = torch.from_numpy(values[start:start + p.numel()]).reshape(p.shape)
            p.data.copy_(part + 1 if "norm" in name else part)
            start += p.numel()
    if dtype == torch.float64:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        make_exact(model, raw, head_dim)
    keys = np.uint64(1 << 63) + np.arange(ROWS * SEQ_LEN, dtype=np.uint64)
    ids = torch.from_numpy((splitmix64(keys) % np.uint64(raw["vocab_size"])).astype(np.int64))
    ids = ids.reshape(ROWS, SEQ_LEN)
    logits = model(input_ids=ids).logits[:, :-1].reshape(-1, raw["vocab_size"])
    loss = F.cross_entropy(logits, ids[:, 1:].reshape(-1), reduction="sum")
    (loss / (ROWS * (SEQ_LEN - 1))).backward()
    gradients = torch.cat([parameters[n].grad.reshape(-1) for names in table for n in names])
    return loss.detach().double().numpy(), gradients.numpy()


for name, extra in MODELS.items():
    raw = BASE | extra
    loss64, gradients64 = run(raw, torch.float64)
    loss32, gradients32 = run(raw, torch.float32)
    (HERE / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")
    with open(HERE / f"{name}.bin", "wb") as out:
        out.write(loss64.astype("<f8").tobytes() + gradients64.astype("<f8").tobytes())
        out.write(loss32.astype("<f8").tobytes() + gradients32.astype("<f4").tobytes())
    distance = np.linalg.norm(gradients32 - gradients64) / np.linalg.norm(gradients64)
    print(name, float(loss64), float(loss32), f"{distance:.2e}")
