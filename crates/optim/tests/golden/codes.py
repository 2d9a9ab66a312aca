"""Writes codes.json: the numbers of the dynamic 8-bit codes, and codes of a few blocks, in float64.

An independent reading of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861): per decade below 1, midpoints of equal parts of [0.1, 1]. Needs numpy.

    python codes.py > codes.json
"""

import json

import numpy as np

BLOCK = 256


def numbers(signed):
    found = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        found += list(middles) + (list(-middles) if signed else [])
    return np.array(sorted(found))


def encode(values, code):
    codes, scales = [], []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        scale = np.abs(block).max()
        relative = block / scale if scale > 0 else block
        distance = np.abs(relative[:, None] - code[None, :])
        nearest = distance.argmin(axis=1)
        if not (code < 0).any():
            # Our one deviation: what is not zero does not become zero.
            nearest = np.where(block != 0, np.maximum(nearest, 1), nearest)
        codes += nearest.tolist()
        scales.append(float(scale))
    return codes, scales


def main():
    random = np.random.default_rng(8)
    signed = (random.standard_normal(600) * np.exp(random.uniform(-9, 1, 600))).astype(np.float32)
    signed[256:300] = 0
    squares = (signed.astype(np.float64) ** 2).astype(np.float32)
    out = {}
    for name, is_signed, values in [("signed", True, signed), ("unsigned", False, squares)]:
        code = numbers(is_signed)
        codes, scales = encode(values, code)
        out[name] = {
            "numbers": code.tolist(),
            "bits": values.view(np.uint32).tolist(),
            "codes": codes,
            "scales": scales,
        }
    print(json.dumps(out))


main()
