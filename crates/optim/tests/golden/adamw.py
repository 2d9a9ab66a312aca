"""Writes adamw.bin: what torch.optim.AdamW makes of 1000 float32 elements in 10 steps.

Run with PyTorch (the file beside this one is from 2.15, CPU): python adamw.py
All numbers little-endian, in this order (the reader is tests/it/golden.rs):
  float32 weight[1000], float32 grad[10][1000]
  per case, in the order of CASES:
    float64 lr, beta1, beta2, eps, weight_decay, max_norm (infinite: no clipping)
    per step of STORED_STEPS: float32 norm (before clipping), weight[1000], exp_avg[1000], exp_avg_sq[1000]
A case with clipping has its gradients clamped to +-4, because PyTorch sums squares in float32.
"""

import math
import pathlib
import struct

import torch

ELEMENTS, STEPS, STORED_STEPS = 1000, 10, (1, 2, 10)
CASES = [
    # lr, beta1, beta2, eps, weight_decay, max_norm
    (1e-3, 0.9, 0.999, 1e-8, 0.0, math.inf),
    (3e-2, 0.9, 0.95, 1e-8, 0.1, math.inf),
    (1e-2, 0.3, 0.5, 1e-6, 0.01, math.inf),  # the other branch of lerp
    (1e-4, 0.9, 0.999, 1e-8, 0.1, 1.0),
]


def inputs():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(ELEMENTS, generator=generator)
    grad = torch.randn(STEPS, ELEMENTS, generator=generator)
    # Magnitudes from 1e-12 to 1e8, constant over time per element.
    grad *= 10.0 ** torch.randint(-12, 9, (ELEMENTS,), generator=generator)
    # Zero weights, zero gradients, both signs of zero, denormals, squares that vanish or overflow.
    weight[0:40] = 0.0
    weight[40:60] = 1e-40
    weight[60:80] *= 1e30
    grad[:, 20:60] = 0.0
    grad[::2, 50:60] = -0.0
    grad[:, 60:120:2] = 1e-42
    grad[:, 120:140] *= 1e-20
    grad[:, 140:160] = 3e18
    grad[:, 160:170] = -1e30
    grad[3:, 170:200] = 0.0
    return weight, grad


def floats(tensor):
    return tensor.detach().numpy().astype("<f4").tobytes()


def case(weight, grad, lr, beta1, beta2, eps, weight_decay, max_norm):
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, foreach=False
    )
    yield struct.pack("<6d", lr, beta1, beta2, eps, weight_decay, max_norm)
    for step in range(1, STEPS + 1):
        parameter.grad = grad[step - 1].clone()
        norm = torch.tensor(0.0)
        if max_norm < math.inf:
            parameter.grad.clamp_(-4.0, 4.0)
            norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm, foreach=False)
        optimizer.step()
        if step in STORED_STEPS:
            state = optimizer.state[parameter]
            yield floats(norm.reshape(1))
            yield floats(parameter) + floats(state["exp_avg"]) + floats(state["exp_avg_sq"])


def main():
    weight, grad = inputs()
    out = floats(weight) + floats(grad)
    for hyperparameters in CASES:
        out += b"".join(case(weight, grad, *hyperparameters))
    pathlib.Path(__file__).with_suffix(".bin").write_bytes(out)


main()
