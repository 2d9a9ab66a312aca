"""Writes quants.bin: random blocks of every GGML type that is converted, and what the Python package
`gguf` makes of them. Needs numpy and gguf.   usage: python quants.py

Layout, little-endian, per type: u32 type number, u32 blocks, raw blocks, float32 values.
"""
import struct
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

BLOCKS = 12
# First bytes of the halves (scales and minima) of each type.
HALVES = {
    T.F16: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}

rng = np.random.default_rng(20)
out = bytearray()
for kind in [T.F32, T.F16, T.BF16, *list(HALVES)[1:]]:
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in HALVES.get(kind, []):
        # Halves: normal, subnormal, zero, negative, large; never infinite.
        bits = rng.integers(0, 0x7C00, BLOCKS, dtype=np.uint16) | (rng.integers(0, 2, BLOCKS, dtype=np.uint16) << 15)
        bits[0], bits[1], bits[2], bits[3] = 0x0001, 0x83FF, 0x0000, 0x2E66
        blocks[:, at : at + 2] = bits.reshape(-1, 1).view(np.uint8)
    if kind in (T.F32, T.BF16):
        # No infinities or NaNs: clear the top exponent bit.
        blocks[:, size - 1] &= 0xBF
    values = quants.dequantize(blocks, kind).astype(np.float32)
    out += struct.pack("<II", kind, BLOCKS) + blocks.tobytes() + values.tobytes()
Path(__file__).with_name("quants.bin").write_bytes(out)
print(len(out), "bytes")
