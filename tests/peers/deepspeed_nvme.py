"""DeepSpeed ZeRO-3 with parameters and optimizer state on NVMe, on the CPU: the work of torch_baseline.py.

Same rows, same order, same output. Needs deepspeed, ninja, transformers and libaio's headers.
"""
import json
import os
import resource
import time

# One process that is its own cluster; DeepSpeed reads these when it is imported.
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1",
                  MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")

import deepspeed
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import lab


def arguments():
    p = lab.training(__doc__)
    p.add_argument("swap", metavar="SWAP_DIR")
    return p.parse_args()


def configuration(a):
    offload = {"device": "nvme", "nvme_path": a.swap, "pin_memory": False, "buffer_count": 5}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload,
            "offload_param": {**offload, "buffer_size": 200_000_000}}
    return {
        "train_micro_batch_size_per_gpu": a.batch_rows,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": a.lr, "weight_decay": 0.0}},
        "zero_optimization": zero,
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    os.makedirs(a.swap, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(a))
    rows = torch.from_numpy(np.load(a.rows).astype("int64"))
    for step in range(a.steps):
        start = time.perf_counter()
        batch = rows[[(step * a.batch_rows + i) % len(rows) for i in range(a.batch_rows)]]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        seconds = time.perf_counter() - start
        line = {"step": step + 1, "loss": loss.item(), "seconds": seconds,
                "tokens_per_second": batch.numel() / seconds}
        print(json.dumps(line), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
