#!/usr/bin/env python3
"""Kills training runs of a real model with SIGKILL until enough kills have hit; every run must end with the
bits of one that nobody disturbed.

    cargo build --release
    tests/campaigns/kills.py MODEL --work DIR [--kills 200] [--policies fused,deferred,speculative]
        [--layout split8] [--more '--io direct --compute-dtype bf16']

MODEL: a Hugging Face directory or a GGUF file, e.g. what tests/peers/get_smollm2.sh fetches. A run has 30
steps; kills come 0.2 to 3 steps apart, the start of the process included. Exits with 1 if a hash differs.
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parents[2]
POLICIES = {
    "fused": ["--clip", "none", "--update", "fused"],
    "deferred": ["--update", "deferred"],
    "speculative": ["--update", "speculative"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", required=True, help="an empty directory on the disk to test")
    parser.add_argument("--ftactor", default=str(HERE / "target/release/ftactor"))
    parser.add_argument("--kills", type=int, default=200, help="for each policy")
    parser.add_argument("--policies", default="fused,deferred")
    parser.add_argument("--layout", default="f32")
    parser.add_argument("--more", default="", help="options of every run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    text = work / "text.txt"
    words = ["lantern", "miller", "boat", "clock", "letter", "owl", "apples", "found", "carried", "mended"]
    dice = random.Random(7)
    text.write_text(" ".join(dice.choice(words) + str(i % 97) for i in range(60_000)))
    fresh = work / "fresh"
    if not fresh.exists():
        run([args.ftactor, "import", args.model, "--store", str(fresh), "--layout", args.layout])
    results = [campaign(args, work, fresh, text, name) for name in args.policies.split(",")]
    print(json.dumps(results, indent=1))
    sys.exit(0 if all(r["wrong"] == 0 for r in results) else 1)


def campaign(args, work, fresh, text, name):
    train = lambda store, first: [args.ftactor, "solo", "--store", str(store), "--quiet", "--metrics", "off",
                                  *args.more.split()] + (
        ["--data", str(text), "--steps", str(args.steps), "--seq-len", str(args.seq_len), "--batch-rows", "2",
         "--lr", "1e-5"] + POLICIES[name] if first else ["--update", name])
    calm = copy(fresh, work / f"calm-{name}")
    started = time.time()
    run(train(calm, True))
    step = (time.time() - started) / args.steps
    want = hashes(args.ftactor, calm)
    shutil.rmtree(calm)
    print(f"{name}: an undisturbed step takes {step:.2f} s", file=sys.stderr)
    dice = random.Random(args.seed)
    kills = runs = wrong = 0
    while kills < args.kills:
        store = copy(fresh, work / f"store-{name}")
        while True:
            first = not (store / "run.json").exists()
            child = subprocess.Popen(train(store, first), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait = dice.uniform(0.2, 3) * step if kills < args.kills else None
            try:
                child.wait(timeout=wait)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                continue
            if child.returncode != 0:
                sys.exit(f"{name}: a run ended with code {child.returncode}; its store is {store}")
            break
        runs += 1
        if hashes(args.ftactor, store) != want:
            wrong += 1
            sys.exit(f"{name}: other bits after {kills} kills; the store is {store}")
        shutil.rmtree(store)
        print(f"{name}: {runs} runs, {kills} kills, all bits equal", file=sys.stderr)
    return {"policy": name, "runs": runs, "kills": kills, "wrong": wrong, "seconds_per_step": round(step, 3)}


def run(command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def copy(source, target):
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    return target


def hashes(ftactor, store):
    shown = subprocess.run([ftactor, "inspect", "--store", str(store), "--json"], check=True, capture_output=True)
    shown = json.loads(shown.stdout)
    return shown["step"], [(layer["hash"], layer["t"]) for layer in shown["layers"]]


if __name__ == "__main__":
    main()
