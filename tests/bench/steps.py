#!/usr/bin/env python3
"""Steps of made-up models of real shapes, each against what `ftactor plan` says of it from a profile that
`ftactor bench` makes first: seconds, the terms that bind, bytes of the disk, memory; and how depth scales.

    cargo build --release
    tests/bench/steps.py --work DIR [--models smollm2,1.1b,...] [--json FILE] [--small]

DIR is on the disk to measure. A model is skipped where its store does not fit there. `--small`: tiny
shapes that only show that the script runs. The other half of the suite is `cargo bench` (optimizer
kernels, layers, engines against fio); tests/peers compares with PyTorch and DeepSpeed.
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parents[2]
# hidden, ffn, layers, heads, kv heads, vocabulary, tied
SHAPES = {
    "smollm2": (576, 1536, 30, 9, 3, 49152, True),
    "layouts": (576, 1536, 30, 9, 3, 49152, True),
    "380m": (1024, 2816, 24, 16, 8, 32000, True),
    "1.1b": (2048, 5632, 22, 32, 4, 32000, False),
    "3.2b": (3072, 8192, 28, 24, 8, 128256, True),
    "8b-wide": (4096, 14336, 2, 32, 8, 128256, False),
    "70b-wide": (8192, 28672, 2, 64, 8, 32000, True),
    "depth-42": (512, 1024, 42, 8, 4, 4096, True),
    "depth-180": (512, 1024, 180, 8, 4, 4096, True),
}
FUSED = ["--clip", "none", "--update", "fused"]
BF16 = ["--compute-dtype", "bf16"]
# model, layout, rows, tokens a row, options
CASES = [
    ("smollm2", "f32", 2, 512, FUSED),
    ("smollm2", "f32", 8, 512, FUSED),
    ("380m", "f32", 2, 512, FUSED + ["--io", "direct", "--ram", "1G"]),
    ("380m", "split", 8, 512, FUSED + BF16 + ["--io", "direct", "--ram", "1G"]),
    ("1.1b", "f32", 1, 512, FUSED + ["--io", "direct", "--ram", "1500M"]),
    ("1.1b", "split", 4, 512, FUSED + BF16 + ["--io", "direct", "--ram", "1500M"]),
    ("3.2b", "split8", 2, 512, FUSED + BF16 + ["--io", "direct", "--ram", "1600M", "--micro-rows", "1"]),
    ("8b-wide", "f32", 2, 1024, FUSED + ["--io", "direct", "--ram", "2500M", "--micro-rows", "1"]),
    ("70b-wide", "split8", 1, 1024, FUSED + BF16 + ["--io", "direct", "--ram", "7G"]),
    ("depth-42", "f32", 2, 256, FUSED + ["--io", "direct", "--ram", "200M"]),
    ("depth-180", "f32", 2, 256, FUSED + ["--io", "direct", "--ram", "200M"]),
]
# Bytes of the disk, with hardly any memory to keep them in.
POLICIES = [FUSED, ["--update", "deferred"], ["--update", "speculative", "--clip", "global:1000000"]]
CASES += [("layouts", layout, 2, 512, policy + ["--io", "direct", "--ram", "420M"])
          for layout in ("f32", "split", "split8", "bf16sr8") for policy in POLICIES]
SMALL = (64, 128, 2, 4, 2, 512, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", required=True, help="an empty directory on the disk to measure")
    parser.add_argument("--ftactor", default=str(HERE / "target/release/ftactor"))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--steps", type=int, default=4, help="the median of all but the first counts")
    parser.add_argument("--json", help="where results go as well")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    profile = work / "profile.toml"
    if not profile.exists():
        quick = ["--disk-bytes", "64M"] if args.small else []
        output(args, "bench", "--store", str(work), "--out", str(profile), *quick)
    chosen = args.models.split(",")
    results = []
    for case in CASES:
        if case[0] in chosen:
            results.append(measure(args, work, profile, *case))
            print(line(results[-1]), flush=True)
    depth = {r["model"]: r for r in results if r["model"].startswith("depth") and "seconds" in r}
    if len(depth) == 2:
        low, high = depth["depth-42"], depth["depth-180"]
        per_layer = lambda r: r["tokens_per_second"] * (1 if args.small else SHAPES[r["model"]][2])
        print(f"tokens/s x layers, 42 -> 180: {per_layer(high) / per_layer(low) - 1:+.1%}; "
              f"anonymous memory {high['anonymous_bytes'] / low['anonymous_bytes'] - 1:+.1%}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))


def measure(args, work, profile, model, layout, rows, seq_len, options):
    shape = SMALL if args.small else SHAPES[model]
    config = work / "config.json"
    config.write_text(json.dumps(config_of(shape, seq_len)))
    data = work / "rows.npy"
    write_rows(data, rows * args.steps, seq_len, shape[5])
    step = ["--seq-len", str(seq_len), "--batch-rows", str(rows), *options]
    plan = json.loads(output(args, "plan", "--config", str(config), "--hardware", str(profile), "--json",
                             *[word for word in step if word not in ("--io", "direct")]))
    plan = next(row for row in plan["layouts"] if row["layout"] == layout)
    result = {"model": model, "layout": layout, "options": " ".join(step)}
    if plan["step"] is None or plan["disk_bytes"] * 1.02 > shutil.disk_usage(work).free:
        return {**result, "skipped": plan["refused"] or "not enough disk"}
    store, log = work / "store", work / "log.jsonl"
    shutil.rmtree(store, ignore_errors=True)
    log.unlink(missing_ok=True)
    output(args, "init", "--config", str(config), "--store", str(store), "--layout", layout)
    command = [args.ftactor, "solo", "--store", str(store), "--data", str(data), "--steps", str(args.steps),
               "--no-shuffle", "--metrics", "off", "--quiet", "--log", str(log), *step]
    marks, anonymous = watch(command, log, args.steps)
    shutil.rmtree(store)
    steps = [entry for entry in map(json.loads, log.read_text().splitlines()) if "loss" in entry]
    seconds = statistics.median([entry["seconds"] for entry in steps[1:]])
    parts = plan["step"]["seconds"]
    terms = {name: parts[name] for name in ("compute", "optimizer", "disk")}
    between = [[b - a for a, b in zip(one, two)] for one, two in zip(marks, marks[1:])]
    read, written = (statistics.median(column) for column in zip(*between)) if between else (None, None)
    return {
        **result, "seconds": seconds, "planned_seconds": parts["step"], "terms": terms,
        "of_plan": seconds / parts["step"], "of_largest_term": seconds / max(terms.values()),
        "tokens_per_second": rows * seq_len / seconds,
        "read_bytes": read, "written_bytes": written,
        "planned_read_bytes": plan["step"]["read_bytes"], "planned_written_bytes": plan["step"]["written_bytes"],
        "anonymous_bytes": anonymous,
    }


def watch(command, log, steps):
    """Bytes of the disk when each step has committed, and the most anonymous memory."""
    said = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
    marks, most = [], 0
    while process.poll() is None:
        try:
            io = dict(row.split(": ") for row in open(f"/proc/{process.pid}/io").read().splitlines())
            rollup = open(f"/proc/{process.pid}/smaps_rollup").read().split()
            most = max(most, int(rollup[rollup.index("Anonymous:") + 1]) * 1024)
            done = sum('"loss"' in row for row in open(log)) if log.exists() else 0
            if len(marks) < done:
                marks += [(int(io["read_bytes"]), int(io["write_bytes"]))] * (done - len(marks))
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)
    if process.returncode != 0:
        said.seek(0)
        sys.exit(f"{' '.join(command)} ended with code {process.returncode}: {said.read()}")
    return marks[:steps], most


def line(r):
    name = f"{r['model']:<10} {r['layout']:<7} {r['options']}"
    if "skipped" in r:
        return f"{name}: skipped, {r['skipped']}"
    gb = lambda bytes: "-" if bytes is None else f"{bytes / 1e9:.2f}"
    terms = ", ".join(f"{name} {value:.1f}" for name, value in r["terms"].items())
    return (f"{name}: {r['seconds']:.2f} s, planned {r['planned_seconds']:.2f} ({terms}), {r['of_plan']:.2f} of the plan, "
            f"{r['of_largest_term']:.2f} of its largest term; read {gb(r['read_bytes'])} of {gb(r['planned_read_bytes'])} GB, "
            f"written {gb(r['written_bytes'])} of {gb(r['planned_written_bytes'])}; {r['anonymous_bytes'] / 1e6:.0f} MB anonymous")


def config_of(shape, seq_len):
    hidden, ffn, layers, heads, kv_heads, vocabulary, tied = shape
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": max(2048, seq_len), "rms_norm_eps": 1e-5,
    }


def write_rows(path, rows, seq_len, vocabulary):
    """A .npy file of random u32 token ids."""
    dice = random.Random(rows * seq_len)
    header = f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({rows}, {seq_len}), }}"
    header = header.ljust(117) + "\n"
    ids = [dice.randrange(vocabulary) for _ in range(rows * seq_len)]
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
                     + struct.pack(f"<{len(ids)}I", *ids))


def output(args, *words):
    done = subprocess.run([args.ftactor, *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"ftactor {' '.join(words)}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
