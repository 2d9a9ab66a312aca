"""Ten steps of training of tiny models, from PyTorch in float64 and float32.

Run: FTACTOR=path/to/ftactor python training.py (torch, transformers, numpy). Writes training.json.

Each model comes from `ftactor init` with a fixed seed and `ftactor export`; the test makes the same
store again. Semantics: rows in their order, mean cross-entropy over a step's targets,
torch.nn.utils.clip_grad_norm_, torch.optim.AdamW with decay on matrices only, linear warmup and half
a cosine down to a tenth.

transformers computes norms and rotary angles in float32 whatever the model's type: for the float64
model both are replaced by the same formulas in float64.
"""

import json
import math
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
STEPS, WARMUP, ROWS, SEQ_LEN, VOCAB = 10, 3, 8, 24, 259
LR, MIN_RATIO, DECAY, CLIP, SEED = 1e-2, 0.1, 0.1, 0.48, 17
SAMPLES = 96
# The models of tests/it/lab.rs.
MODELS = [
    ("llama", True, 2), ("llama", False, 3), ("qwen2", True, 2), ("qwen3", False, 2),
    ("mistral", False, 2),
]


def config(family, tied, layers):
    return dict(
        model_type=family, vocab_size=VOCAB, hidden_size=16, intermediate_size=24,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        max_position_embeddings=64, tie_word_embeddings=tied)


def token_rows():
    """Ids that a model can learn something of: each follows from the one before, with jumps."""
    rows = np.zeros((STEPS * ROWS, SEQ_LEN), dtype=np.int64)
    state = 12345
    for row in rows:
        state = (state * 1103515245 + 12345) % (1 << 31)
        at = (state >> 16) % VOCAB
        for column in range(SEQ_LEN):
            row[column] = at
            state = (state * 1103515245 + 12345) % (1 << 31)
            at = (at * 5 + 3) % VOCAB if (state >> 16) % 4 else (state >> 16) % VOCAB
    return rows


def export(family, tied, layers, directory):
    binary = os.environ["FTACTOR"]
    path = directory / "config.json"
    path.write_text(json.dumps(config(family, tied, layers)))
    store, out = directory / "store", directory / "out"
    for args in (["init", "--config", path, "--store", store, "--seed", str(SEED)],
                 ["export", "--store", store, "--out", out]):
        subprocess.run([binary, *map(str, args)], check=True, stdout=subprocess.DEVNULL)
    return out


def make_exact(model):
    """Norms and rotary angles in float64."""
    rotary, head_dim = model.model.rotary_emb, model.config.head_dim
    theta = model.config.rope_parameters["rope_theta"]
    freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
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


def learning_rate(step):
    if step <= WARMUP:
        return LR * step / WARMUP
    height = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
    return LR * height + LR * MIN_RATIO * (1 - height)


def train(directory, dtype):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager").to(dtype)
    model.train()
    if dtype == torch.float64:
        make_exact(model)
    parameters = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in parameters.items()}
    groups = [
        dict(params=[p for p in parameters.values() if p.dim() >= 2], weight_decay=DECAY),
        dict(params=[p for p in parameters.values() if p.dim() < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    rows = torch.from_numpy(token_rows()).reshape(STEPS, ROWS, SEQ_LEN)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        ids = rows[step - 1]
        logits = model(input_ids=ids).logits[:, :-1].reshape(-1, VOCAB)
        loss = F.cross_entropy(logits, ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    updates = {n: (p.detach() - start[n]).double().reshape(-1) for n, p in parameters.items()}
    return losses, norms, updates, start


def short(values):
    return [float(f"{float(v):.7g}") for v in values]


def golden(family, tied, layers, directory):
    out = export(family, tied, layers, directory)
    losses, norms, updates, start = train(out, torch.float64)
    losses32, norms32, updates32, _ = train(out, torch.float32)
    tensors = {}
    for name, update in sorted(updates.items()):
        stride = max(1, len(update) // SAMPLES)
        tensors[name] = dict(
            start_norm=float(start[name].double().norm()), update_norm=float(update.norm()),
            stride=stride, update=short(update[::stride]))
    worst = min(float(F.cosine_similarity(u, updates32[n], dim=0)) for n, u in updates.items())
    name = f"{family}_{'tied' if tied else 'untied'}"
    far = max(abs(a - b) for a, b in zip(losses, losses32))
    norm_far = max(abs(a - b) / a for a, b in zip(norms, norms32))
    print(f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}, norms {max(norms):.3f} to "
          f"{min(norms):.3f}; float32 differs by {far:.1e}, {norm_far:.1e}, cosine {worst:.8f}")
    return name, dict(losses=losses, norms=norms, tensors=tensors)


def main():
    models = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            name, values = golden(*model, pathlib.Path(directory))
            models[name] = values
    checksum = int(sum((i + 1) * int(v) for i, v in enumerate(token_rows().reshape(-1))))
    result = dict(rows_checksum=checksum, models=models)
    text = json.dumps(result, separators=(",", ":"))
    (HERE / "training.json").write_text(text.replace('},"', '},\n"') + "\n")


main()
