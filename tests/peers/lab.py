"""What the scripts share: arguments, running ftactor, token rows, tensors of a checkpoint, a table of checks."""
import argparse
import json
import os
import subprocess
import sys

import numpy as np


def parser(about):
    """What every script begins with: its text as help, and how many threads compute."""
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=2)
    return p


def comparison(about):
    """What the scripts share that run ftactor beside something else on token rows."""
    p = parser(about)
    p.add_argument("--ftactor", default="ftactor", metavar="BINARY")
    p.add_argument("--text", metavar="FILE", help="take the rows from this text (default: random tokens)")
    return p


def training(about):
    """What the scripts share that train a model on rows in their order."""
    p = parser(about)
    p.add_argument("model", metavar="MODEL_DIR")
    p.add_argument("rows", metavar="ROWS.npy")
    p.add_argument("--batch-rows", type=int, default=2)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-5)
    return p


class Checks:
    """Prints a line for each comparison and remembers whether all held."""

    def __init__(self):
        self.failed = 0

    def at_most(self, name, value, limit):
        self._line(name, value, f"<= {limit:g}", value <= limit)

    def at_least(self, name, value, limit):
        self._line(name, value, f">= {limit:g}", value >= limit)

    def _line(self, name, value, bound, holds):
        self.failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {name:<44} {value:>12.6g}  {bound}", flush=True)

    def exit_code(self):
        return 1 if self.failed else 0


def ftactor(binary, *words):
    """Runs the command; its standard output. Ends this process if it fails."""
    command = [binary, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def make_rows(path, model_dir, rows, seq_len, text=None):
    """Writes token rows (rows, seq_len): of a text if given one, else random ids, always the same."""
    with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
        vocab_size = json.load(file)["vocab_size"]
    if text is None:
        ids = np.random.default_rng(0).integers(0, vocab_size, rows * seq_len)
    else:
        from transformers import AutoTokenizer
        with open(text, encoding="utf-8") as file:
            ids = AutoTokenizer.from_pretrained(model_dir)(file.read(), verbose=False)["input_ids"]
        if len(ids) < rows * seq_len:
            sys.exit(f"{text} has {len(ids)} tokens, {rows} rows of {seq_len} need {rows * seq_len}")
    ids = np.asarray(ids[:rows * seq_len], dtype=np.uint32).reshape(rows, seq_len)
    np.save(path, ids)
    return ids


def tensors(directory):
    """Name -> float32 tensor of a checkpoint, whether it is one file, shards or a store."""
    from safetensors.torch import load_file
    index = os.path.join(directory, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    found = {}
    for name in files:
        found.update(load_file(os.path.join(directory, name)))
    return {name: tensor.float() for name, tensor in found.items()}
