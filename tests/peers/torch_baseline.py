"""PyTorch with everything in RAM: AdamW steps of a Hugging Face model on fixed token rows.

ROWS.npy is a 2-D integer array (rows, seq_len); step i takes rows i*B .. i*B+B in their order, from the
start again at the end. Prints one JSON object a step, at last one with the peak of resident memory.
Needs torch and transformers.
"""
import json
import resource
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import lab


def arguments():
    p = lab.training(__doc__)
    p.add_argument("--wd", type=float, default=0.0, help="decoupled weight decay, on matrices only")
    p.add_argument("--clip", type=float, default=1.0, help="largest norm of the whole gradient")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16: autocast")
    p.add_argument("--recompute", action="store_true", help="activation checkpointing")
    p.add_argument("--save", metavar="DIR", help="write the trained model")
    return p.parse_args()


def optimizer(model, lr, weight_decay):
    matrices = [q for q in model.parameters() if q.dim() >= 2]
    vectors = [q for q in model.parameters() if q.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).train()
    if a.recompute:
        model.gradient_checkpointing_enable()
    rows = torch.from_numpy(np.load(a.rows).astype("int64"))
    adamw = optimizer(model, a.lr, a.wd)
    for step in range(a.steps):
        start = time.perf_counter()
        batch = rows[[(step * a.batch_rows + i) % len(rows) for i in range(a.batch_rows)]]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        adamw.step()
        adamw.zero_grad()
        seconds = time.perf_counter() - start
        line = {"step": step + 1, "loss": loss.item(), "grad_norm": float(norm), "seconds": seconds,
                "tokens_per_second": batch.numel() / seconds}
        print(json.dumps(line), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_rss_bytes": peak}))
    if a.save:
        model.save_pretrained(a.save)


if __name__ == "__main__":
    main()
