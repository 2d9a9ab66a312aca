"""Writes NAME.gguf for tiny random models, NAME.safetensors: the float32 weights that transformers
reads from it, and ids.json: the token ids that it gives to some texts. Needs torch, transformers, gguf, safetensors.   usage: python tiny_gguf.py
"""
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
D, F, VOCAB = 32, 64, 272
T = gguf.GGMLQuantizationType
MERGES = ["Ġ t", "Ġt h", "1 2", "12 3", "123 4", "Ġ Ġ", "ĠĠ Ġ", "' s", "a b", "ab c", "Ċ Ċ", "! !", "Ġ 1"]
PIECES = ["▁", "a", "b", "t", "h", "e", "▁a", "ab", "th", "the", "▁the", "▁t", "▁▁"]
TEXTS = [
    "a the", " the  the   the", "12345 1 12 1234", "it's IT'S abc Abc", "a\n\nb\n \n\tc", "a!!! b!!\n",
    "<|eos|>a the<|endoftext|> <|bos|>", "</s> the<s>ab<unk>", "é ü 日本 🎉", "", "   ", "x\r\ny",
]
ids = {}


def letters():
    spelled, n = [], 0
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255:
            spelled.append(chr(b))
        else:
            spelled.append(chr(256 + n))
            n += 1
    return spelled


def write(arch, kind, head_dim, tied, heads=4, kv=2, layers=2, pre="qwen2", name=None):
    name = name or arch
    rng = np.random.default_rng(len(arch) + head_dim)
    w = gguf.GGUFWriter(HERE / f"{name}.gguf", arch)
    w.add_context_length(64)
    w.add_embedding_length(D)
    w.add_feed_forward_length(F)
    w.add_block_count(layers)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(50000.0)
    w.add_vocab_size(VOCAB)
    if arch == "llama":
        w.add_rope_dimension_count(head_dim)
    else:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if pre:
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(pre)
        merged = [m.replace(" ", "") for m in MERGES]
        w.add_token_list(letters() + merged + ["<|bos|>", "<|eos|>", "<|endoftext|>"])
        w.add_token_types([1] * 269 + [3, 3, 3])
        w.add_token_merges(MERGES)
        w.add_bos_token_id(269)
        w.add_eos_token_id(270)
    else:
        w.add_tokenizer_model("llama")
        w.add_token_list(["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + PIECES)
        w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES))
        w.add_token_scores([0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0, -1.5, -1.0, -4.0, -5.0])
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)

    def add(tensor, *shape, kind=T.F32, mean=0.0):
        values = (rng.standard_normal(shape) * 0.05 + mean).astype(np.float32)
        if kind == T.F32:
            w.add_tensor(tensor, values)
        else:
            w.add_tensor(tensor, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, D, kind=T.F16)
    add("output_norm.weight", D, mean=1.0)
    if not tied:
        add("output.weight", VOCAB, D, kind=kind)
    for i in range(layers):
        b = f"blk.{i}."
        add(b + "attn_norm.weight", D, mean=1.0)
        add(b + "ffn_norm.weight", D, mean=1.0)
        add(b + "attn_q.weight", heads * head_dim, D, kind=kind)
        add(b + "attn_k.weight", kv * head_dim, D, kind=kind)
        add(b + "attn_v.weight", kv * head_dim, D, kind=kind)
        add(b + "attn_output.weight", D, heads * head_dim, kind=kind)
        add(b + "ffn_gate.weight", F, D, kind=kind)
        add(b + "ffn_up.weight", F, D, kind=kind)
        add(b + "ffn_down.weight", D, F, kind=kind)
        if arch == "qwen2":
            add(b + "attn_q.bias", heads * head_dim)
            add(b + "attn_k.bias", kv * head_dim)
            add(b + "attn_v.bias", kv * head_dim)
        if arch == "qwen3":
            add(b + "attn_q_norm.weight", head_dim, mean=1.0)
            add(b + "attn_k_norm.weight", head_dim, mean=1.0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    tokenizer = AutoTokenizer.from_pretrained(HERE, gguf_file=f"{name}.gguf")
    ids[name] = [[text, tokenizer(text)["input_ids"]] for text in TEXTS]
    model = AutoModelForCausalLM.from_pretrained(HERE, gguf_file=f"{name}.gguf", dtype=torch.float32)
    state = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    save_file(state, HERE / f"{name}.safetensors")


write("llama", T.Q8_0, 8, True, pre="llama-bpe")
write("qwen2", T.Q5_1, 8, False)
# transformers takes Qwen3's head size from its own default, not from the file.
write("qwen3", T.Q4_0, 128, True, heads=2, kv=1, layers=1, pre="tekken")
write("llama", T.F16, 8, True, layers=1, pre="default", name="gpt2")
write("llama", T.BF16, 8, True, layers=1, pre=None, name="sentencepiece")
(HERE / "ids.json").write_text(json.dumps(ids, ensure_ascii=True))
