//! The byte tokenizer: ids 0-255 are the bytes of the text, 256 BOS, 257 EOS, 258 PAD.
//!
//! Invariants:
//! - [`json`] is the same tokenizer in Hugging Face's format; a test holds both to equal ids;
//! - as there, the special tokens' own spelling inside a text becomes their id.

/// Begin of sequence.
pub const BYTES_BOS: u32 = 256;
/// End of sequence.
pub const BYTES_EOS: u32 = 257;
/// Padding.
pub const BYTES_PAD: u32 = 258;
/// Number of ids.
pub const BYTES_VOCAB_SIZE: u32 = 259;

const SPECIAL: [(&str, u32); 3] =
    [("<|bos|>", BYTES_BOS), ("<|eos|>", BYTES_EOS), ("<|pad|>", BYTES_PAD)];

/// Appends the ids of `text`.
pub(crate) fn encode(text: &str, ids: &mut Vec<u32>) {
    let mut rest = text.as_bytes();
    ids.reserve(rest.len());
    while let Some(&byte) = rest.first() {
        let (id, length) = special_at(rest).unwrap_or((u32::from(byte), 1));
        ids.push(id);
        rest = &rest[length..];
    }
}

/// The text of `ids`, lossy where they are not UTF-8; ids beyond the vocabulary are skipped.
pub(crate) fn decode(ids: &[u32], keep_special: bool) -> String {
    let mut bytes = Vec::with_capacity(ids.len());
    for &id in ids {
        match u8::try_from(id) {
            Ok(byte) => bytes.push(byte),
            Err(_) if keep_special => bytes.extend_from_slice(special_text(id).as_bytes()),
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The tokenizer as `tokenizer.json`, in the form in which the Hugging Face library saves it.
pub(crate) fn json() -> String {
    let added: Vec<String> = SPECIAL.iter().map(|(text, id)| added_token(text, *id)).collect();
    let vocab: Vec<String> =
        byte_characters().iter().enumerate().map(|(id, c)| vocab_line(*c, id)).collect();
    format!(
        r#"{{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [
{}
  ],
  "normalizer": null,
  "pre_tokenizer": {{
    "type": "ByteLevel",
    "add_prefix_space": false,
    "trim_offsets": true,
    "use_regex": false
  }},
  "post_processor": null,
  "decoder": {{
    "type": "ByteLevel",
    "add_prefix_space": true,
    "trim_offsets": true,
    "use_regex": true
  }},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": false,
    "vocab": {{
{}
    }},
    "merges": []
  }}
}}"#,
        added.join(",\n"),
        vocab.join(",\n"),
    )
}

/// The `tokenizer_config.json` beside [`json`], which names the special tokens.
pub(crate) fn config_json() -> String {
    let [(bos, _), (eos, _), (pad, _)] = SPECIAL;
    format!(
        r#"{{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "bos_token": "{bos}",
  "eos_token": "{eos}",
  "pad_token": "{pad}",
  "clean_up_tokenization_spaces": false
}}
"#
    )
}

fn special_at(bytes: &[u8]) -> Option<(u32, usize)> {
    if bytes[0] != b'<' {
        return None;
    }
    let found = SPECIAL.iter().find(|(text, _)| bytes.starts_with(text.as_bytes()))?;
    Some((found.1, found.0.len()))
}

fn special_text(id: u32) -> &'static str {
    SPECIAL.iter().find(|(_, special)| *special == id).map_or("", |(text, _)| text)
}

fn added_token(text: &str, id: u32) -> String {
    format!(
        r#"    {{
      "id": {id},
      "content": "{text}",
      "single_word": false,
      "lstrip": false,
      "rstrip": false,
      "normalized": false,
      "special": true
    }}"#
    )
}

fn vocab_line(c: char, id: usize) -> String {
    match c {
        '"' | '\\' => format!("      \"\\{c}\": {id}"),
        _ => format!("      \"{c}\": {id}"),
    }
}

/// The character that stands for each byte in a byte-level vocabulary (GPT-2's table): printable
/// Latin-1 bytes stand for themselves, the others take the code points from 256 on in order.
fn byte_characters() -> [char; 256] {
    let mut next = 256_u32;
    std::array::from_fn(|byte| {
        let byte = u8::try_from(byte).unwrap_or(0);
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            return char::from(byte);
        }
        let c = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
        next += 1;
        c
    })
}
