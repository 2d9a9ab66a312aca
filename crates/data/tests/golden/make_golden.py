"""Makes the golden files beside it: small tokenizers, transformers' ids for a text, NumPy files.

usage: python make_golden.py
Needs tokenizers, transformers and numpy; every file is made anew and is the same each time.
"""
import json
import pathlib
import random

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = (
    "the layer weight moment stream disk step commit row token learn train loss falls every time and when "
    "a model reads writes it's we'll don't I'M THEY'RE naïve café Straße привет мир 東京 日本語 नमस्ते 42 2026 3.1415 "
    "0x7f fn main() {} // -> => != :: \t <|eos|> <|end|> e\u0301 \u00a0 \u2028 🙂 👩‍🚀 ﬁ ½ <b> \"quoted\" snake_case CamelCase"
).split(" ")
ENDS = [" ", " ", " ", " ", " ", "\n", "\n\n", "  ", "\r\n", ". ", ", ", "\n    ", " \n", "\t"]


def text(words, seed):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(ENDS) for _ in range(words))


def byte_characters():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def bytes_tokenizer():
    t = Tokenizer(models.BPE(vocab={c: b for b, c in sorted(byte_characters().items())}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<|bos|>", "<|eos|>", "<|pad|>"])
    return t


def byte_level_bpe(pre_tokenizer, normalizer=None, truncate=False):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        t.normalizer = normalizer
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    t.train_from_iterator([text(4000, 1)], trainer)
    if truncate:
        t.enable_truncation(16)
        t.enable_padding(length=32)
    return t


def sentencepiece_style():
    """As Llama 2: spaces become U+2581, byte fallback, no pre-tokenizer."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *fallback], limit_alphabet=60, show_progress=False
    )
    # Trained on words: a model that merges across spaces would be all of this text's phrases.
    t.train_from_iterator([word for word in text(4000, 1).split(" ")], trainer)
    saved = json.loads(t.to_str())
    saved["added_tokens"] = [a for a in saved["added_tokens"] if a["id"] < 3]
    return Tokenizer.from_str(json.dumps(saved))


def save(name, tokenizer, sample):
    # The byte tokenizer is compared with ours character by character; the others only take room.
    tokenizer.save(str(HERE / f"{name}.json"), pretty=name == "bytes")
    ids = PreTrainedTokenizerFast(tokenizer_file=str(HERE / f"{name}.json"))(sample, add_special_tokens=False)["input_ids"]
    (HERE / f"{name}.ids.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")


def main():
    sample = text(1500, 2)
    (HERE / "sample.txt").write_bytes(sample.encode())
    save("bytes", bytes_tokenizer(), sample[:1500])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save("gpt2_style", byte_level_bpe(byte_level, truncate=True), sample)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    save("smollm_style", byte_level_bpe(digits), sample)
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    save("llama3_style", byte_level_bpe(split, normalizers.NFC()), sample)
    save("llama2_style", sentencepiece_style(), sample)
    np.save(HERE / "stream_u16.npy", np.arange(20, dtype=np.uint16))
    np.save(HERE / "stream_i64.npy", np.arange(20, dtype=np.int64) + 20)
    np.save(HERE / "rows_u32.npy", np.arange(24, dtype=np.uint32).reshape(3, 8) + 40)
    with open(HERE / "rows_v2.npy", "wb") as f:
        np.lib.format.write_array(f, np.arange(8, dtype=np.uint32).reshape(1, 8) + 64, version=(2, 0))
    with open(HERE / "rows_v3.npy", "wb") as f:
        np.lib.format.write_array(f, np.arange(8, dtype=np.int64).reshape(1, 8) + 72, version=(3, 0))


if __name__ == "__main__":
    main()
