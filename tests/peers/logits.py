"""The store as a checkpoint: transformers loads the store's directory itself, and its loss equals ftactor's.

Checks that (1) an export's tensors equal the store's bit for bit, (2) transformers gives the same logits, bit
for bit, from both, (3) its mean loss on the same rows is that of `ftactor eval` within 1e-4, and (4) its logits
behind a prompt are ftactor's within 1e-4. Exit code 0 if all hold. Needs torch, transformers, safetensors.
"""
import json
import os
import sys
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lab

PROMPT = "The harbour was quiet when the two of them came down to the boats, and nobody asked what they carried in the"


def arguments():
    p = lab.comparison(__doc__)
    p.add_argument("store", metavar="STORE", help="a store that nobody is training")
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--seq-len", type=int, default=128)
    return p.parse_args()


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def differing_tensors(store, export):
    ours, theirs = lab.tensors(store), lab.tensors(export)
    if missing := (ours.keys() ^ theirs.keys()):
        sys.exit(f"not in both checkpoints: {sorted(missing)}")
    bits = lambda tensor: tensor.view(torch.int32)
    return sum(not torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)


def logits_behind(a, prompt, model, file):
    lab.ftactor(a.ftactor, "generate", "--store", a.store, "--prompt", prompt, "--max-tokens", 0,
                "--logits", file, "--threads", a.threads)
    ids = AutoTokenizer.from_pretrained(a.store)(prompt, return_tensors="pt").input_ids
    return model(input_ids=ids).logits[0, -1], torch.from_numpy(np.fromfile(file, dtype="<f4"))


@torch.no_grad()
def compare(a, work):
    rows_file, export = os.path.join(work, "rows.npy"), os.path.join(work, "export")
    ids = torch.from_numpy(lab.make_rows(rows_file, a.store, a.rows, a.seq_len, a.text).astype("int64"))
    said = lab.ftactor(a.ftactor, "eval", "--store", a.store, "--data", rows_file,
                       "--seq-len", a.seq_len, "--threads", a.threads, "--json")
    lab.ftactor(a.ftactor, "export", "--store", a.store, "--out", export)

    checks = lab.Checks()
    checks.at_most("tensors that differ: store and export", differing_tensors(a.store, export), 0)
    from_store, from_export = load(a.store), load(export)
    output = from_store(input_ids=ids, labels=ids)
    logits = from_export(input_ids=ids).logits
    checks.at_most("logits that differ: store and export", int((output.logits != logits).sum()), 0)
    difference = abs(json.loads(said)["loss"] - output.loss.item())
    checks.at_most("loss: ftactor and transformers", difference, 1e-4)
    theirs, ours = logits_behind(a, PROMPT, from_store, os.path.join(work, "logits"))
    checks.at_most("largest difference of logits: ftactor and transformers", float((theirs - ours).abs().max()), 1e-4)
    return checks.exit_code()


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as work:
        return compare(a, work)


if __name__ == "__main__":
    sys.exit(main())
