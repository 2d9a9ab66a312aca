"""Training parity: the same model on the same rows with PyTorch in RAM and with ftactor from the disk.

Compares losses, gradient norms, each tensor's whole update (its direction, as cosine, and its length), and the
part of it that is weight decay. Exit code 0 if every line holds. Needs torch, transformers, safetensors; both sides compute in float32.
"""
import os
import subprocess
import sys
import tempfile

import lab

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments():
    p = lab.comparison(__doc__)
    p.add_argument("model", metavar="MODEL_DIR", help="a float32 Hugging Face directory")
    p.add_argument("--seq-len", type=int, default=512)
    p.add_argument("--batch-rows", type=int, default=2)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--wd", type=float, default=0.1)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--work", metavar="DIR", help="keep everything here (default: a temporary directory)")
    return p.parse_args()


def run_torch(a, rows, out):
    command = [sys.executable, os.path.join(HERE, "torch_baseline.py"), a.model, rows, "--save", out,
               "--batch-rows", a.batch_rows, "--steps", a.steps, "--lr", a.lr, "--wd", a.wd, "--clip", a.clip,
               "--threads", a.threads]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return [line for line in lab.json_lines(done.stdout) if "loss" in line]


def run_ftactor(a, rows, work, out):
    store = os.path.join(work, "store")
    lab.ftactor(a.ftactor, "import", a.model, "--store", store)
    said = lab.ftactor(
        a.ftactor, "solo", "--store", store, "--data", rows, "--no-shuffle", "--seq-len", a.seq_len,
        "--batch-rows", a.batch_rows, "--steps", a.steps, "--lr", a.lr, "--weight-decay", a.wd,
        "--clip", f"global:{a.clip}", "--schedule", "constant", "--warmup-steps", 0,
        "--threads", a.threads, "--metrics", "off", "--json")
    lab.ftactor(a.ftactor, "export", "--store", store, "--out", out)
    return [line for line in lab.json_lines(said) if "loss" in line and "event" not in line]


def compare_steps(checks, theirs, ours):
    if len(theirs) != len(ours):
        sys.exit(f"PyTorch made {len(theirs)} steps, ftactor {len(ours)}")
    for t, o in zip(theirs, ours):
        print(f"step {t['step']:>3}  loss {t['loss']:.6f} {o['loss']:.6f}  norm {t['grad_norm']:.6f} {o['grad_norm']:.6f}")
    losses = [abs(t["loss"] - o["loss"]) for t, o in zip(theirs, ours)]
    norms = [abs(t["grad_norm"] - o["grad_norm"]) / t["grad_norm"] for t, o in zip(theirs, ours)]
    checks.at_most("first loss: difference", losses[0], 1e-4)
    checks.at_most("losses: largest difference", max(losses), 2e-3)
    checks.at_most("gradient norms: largest relative difference", max(norms), 1e-3)


def compare_updates(checks, start, theirs, ours):
    """Each tensor's update W - W0, in float64."""
    worst_cosine, worst_length = (2.0, ""), (-1.0, "")
    for name, w0 in start.items():
        t, o = (theirs[name] - w0).double().flatten(), (ours[name] - w0).double().flatten()
        cosine = float(t @ o / (t.norm() * o.norm()))
        length = abs(float(o.norm() / t.norm()) - 1.0)
        worst_cosine, worst_length = min(worst_cosine, (cosine, name)), max(worst_length, (length, name))
    checks.at_least(f"update's cosine: smallest of {len(start)}", worst_cosine[0], 0.999)
    checks.at_most("update's length: largest relative difference", worst_length[0], 0.01)
    print(f"       smallest cosine in {worst_cosine[1]}, largest difference in length in {worst_length[1]}")


def compare_decay(checks, shrinkage, start, theirs, ours):
    """How much farther one side pulled its matrices towards zero, as a part of what decay does."""
    matrices = [name for name, w0 in start.items() if w0.dim() >= 2]
    dot = lambda x, y: float(x.double().flatten() @ y.double().flatten())
    apart = sum(dot(ours[name] - theirs[name], start[name]) for name in matrices)
    pulled = abs(apart) / sum(dot(start[name], start[name]) for name in matrices)
    checks.at_most("weight decay: relative difference", pulled / shrinkage, 0.1)


def compare(a, work):
    rows, theirs_dir, ours_dir = (os.path.join(work, name) for name in ("rows.npy", "torch", "ftactor"))
    lab.make_rows(rows, a.model, a.batch_rows * a.steps, a.seq_len, a.text)
    theirs, ours = run_torch(a, rows, theirs_dir), run_ftactor(a, rows, work, ours_dir)
    checks = lab.Checks()
    compare_steps(checks, theirs, ours)
    # A tied model may name its head in one checkpoint and leave it out of another.
    start, theirs, ours = lab.tensors(a.model), lab.tensors(theirs_dir), lab.tensors(ours_dir)
    names = start.keys() & theirs.keys() & ours.keys()
    if missing := (start.keys() ^ names) - {"lm_head.weight"}:
        sys.exit(f"not in every checkpoint: {sorted(missing)}")
    start = {name: start[name] for name in sorted(names)}
    compare_updates(checks, start, theirs, ours)
    if a.wd > 0:
        compare_decay(checks, a.lr * a.wd * a.steps, start, theirs, ours)
    return checks.exit_code()


def main():
    a = arguments()
    if a.work:
        os.makedirs(a.work, exist_ok=True)
        return compare(a, a.work)
    with tempfile.TemporaryDirectory() as work:
        return compare(a, work)


if __name__ == "__main__":
    sys.exit(main())
