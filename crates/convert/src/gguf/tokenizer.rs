//! The `tokenizer.json` and `tokenizer_config.json` that a GGUF file's metadata describes.
//!
//! Invariants:
//! - ids are those of transformers' own conversion of the same file (`gguf_tokenizer_mapping`);
//! - no token gets an id beyond the vocabulary of the file.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value as Json, json};

use super::alphabet::Alphabet;
use super::config::token_id;
use super::parse::Value;

type Metadata = BTreeMap<String, Value>;

const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// More merges than any vocabulary has.
const MERGE_LIMIT: usize = 1 << 22;
/// Longest token that is cut into merges, in bytes.
const TOKEN_LIMIT_BYTES: usize = 1024;

/// How the metadata's vocabulary cuts text before merging.
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN_SPLIT: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A rebuilt tokenizer.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    pub(crate) files: Vec<(String, Vec<u8>)>,
    pub(crate) warnings: Vec<String>,
}

/// Rebuilds the tokenizer; the `Err` says what cannot be rebuilt.
pub(crate) fn build(metadata: &Metadata) -> Result<Tokenizer, String> {
    let source = Vocabulary::new(metadata)?;
    let mut warnings = Vec::new();
    let json = match source.model {
        "gpt2" => byte_level(&source, &mut warnings)?,
        "llama" => sentencepiece(&source)?,
        other => return Err(format!("has a tokenizer of the unsupported kind `{other}`")),
    };
    let files = vec![
        ("tokenizer.json".into(), json.to_string().into_bytes()),
        ("tokenizer_config.json".into(), source.config().to_string().into_bytes()),
    ];
    Ok(Tokenizer { files, warnings })
}

/// The tokenizer's part of the metadata.
struct Vocabulary<'m> {
    metadata: &'m Metadata,
    model: &'m str,
    tokens: &'m [String],
    kinds: &'m [i64],
    /// By role: `bos`, `eos`, `unk`, `pad`.
    named: Vec<(&'static str, usize)>,
    /// Tokens that are special whatever their kind.
    special: Vec<usize>,
}

impl<'m> Vocabulary<'m> {
    fn new(metadata: &'m Metadata) -> Result<Vocabulary<'m>, String> {
        let Some(Value::Text(model)) = metadata.get("tokenizer.ggml.model") else {
            return Err("has no tokenizer (`tokenizer.ggml.model`)".into());
        };
        let Some(Value::Texts(tokens)) = metadata.get("tokenizer.ggml.tokens") else {
            return Err("has no vocabulary (`tokenizer.ggml.tokens`)".into());
        };
        let kinds = match metadata.get("tokenizer.ggml.token_type") {
            Some(Value::Integers(kinds)) => kinds.as_slice(),
            _ => &[],
        };
        let mut named = Vec::new();
        for (role, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
        {
            if let Some(id) = token_id(metadata, key)? {
                named.push((role, id));
            }
        }
        let by_name = defaults(model).iter().filter_map(|d| tokens.iter().position(|t| t == d));
        let special = by_name.chain(named.iter().map(|(_, id)| *id)).collect();
        Ok(Vocabulary { metadata, model, tokens, kinds, named, special })
    }

    fn token(&self, role: &str) -> Option<(usize, &str)> {
        let (_, id) = self.named.iter().find(|(name, _)| *name == role)?;
        Some((*id, &self.tokens[*id]))
    }

    fn flag(&self, name: &str) -> Option<bool> {
        match self.metadata.get(&format!("tokenizer.ggml.{name}")) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        }
    }

    /// Whether BOS is put in front of a text; SentencePiece vocabularies do unless they say no.
    fn adds_bos(&self) -> bool {
        self.flag("add_bos_token").unwrap_or(self.model == "llama") && self.token("bos").is_some()
    }

    fn adds_eos(&self) -> bool {
        self.flag("add_eos_token").unwrap_or(false) && self.token("eos").is_some()
    }

    fn is_special(&self, id: usize) -> bool {
        self.special.contains(&id)
    }

    /// The contents of `tokenizer_config.json`.
    fn config(&self) -> Json {
        let mut map = Map::new();
        map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        map.insert("clean_up_tokenization_spaces".into(), json!(false));
        map.insert("add_bos_token".into(), json!(self.adds_bos()));
        map.insert("add_eos_token".into(), json!(self.adds_eos()));
        for (role, id) in &self.named {
            map.insert(format!("{role}_token"), json!(self.tokens[*id]));
        }
        if let Some(Value::Text(template)) = self.metadata.get("tokenizer.chat_template") {
            map.insert("chat_template".into(), json!(template));
        }
        Json::Object(map)
    }

    /// Ids by spelling; a spelling of two tokens is an error.
    fn ids(&self, spelled: &[String]) -> Result<HashMap<String, usize>, String> {
        let mut ids = HashMap::with_capacity(spelled.len());
        for (id, token) in spelled.iter().enumerate() {
            if let Some(other) = ids.insert(token.clone(), id) {
                return Err(format!("has the token {token:?} twice, as {other} and {id}"));
            }
        }
        Ok(ids)
    }

    fn merges(&self, ids: &HashMap<String, usize>) -> Result<Option<Vec<[String; 2]>>, String> {
        let Some(Value::Texts(merges)) = self.metadata.get("tokenizer.ggml.merges") else {
            return Ok(None);
        };
        let pair = |merge: &String| {
            let (left, right) = merge.split_once(' ')?;
            let known =
                [left, right, &format!("{left}{right}")].iter().all(|t| ids.contains_key(*t));
            known.then(|| [left.to_string(), right.to_string()])
        };
        merges
            .iter()
            .map(|merge| pair(merge).ok_or_else(|| format!("has the impossible merge {merge:?}")))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// `added_tokens`: what is matched as a whole before anything else. `takes` says which control
    /// and user-defined tokens are.
    fn added_tokens(&self, spelled: &[String], takes: impl Fn(usize, i64) -> bool) -> Json {
        let kind = |id: usize| self.kinds.get(id).copied().unwrap_or_default();
        let added = (0..self.tokens.len()).filter_map(|id| {
            let special = self.is_special(id) || kind(id) == CONTROL;
            let listed = matches!(kind(id), CONTROL | USER_DEFINED) && takes(id, kind(id));
            (listed || self.is_special(id)).then(|| {
                json!({
                    "id": id, "content": spelled[id], "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": special,
                })
            })
        });
        Json::Array(added.collect())
    }

    fn post_processor(&self) -> Json {
        let bos = self.token("bos").filter(|_| self.adds_bos());
        let eos = self.token("eos").filter(|_| self.adds_eos());
        let special = |token: Option<(usize, &str)>, sequence: usize| {
            token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": sequence}}))
        };
        let sequence = |name: &str, number: usize| {
            let text = json!({"Sequence": {"id": name, "type_id": number}});
            [special(bos, number), Some(text), special(eos, number)].into_iter().flatten()
        };
        let tokens: Map<String, Json> = [bos, eos]
            .into_iter()
            .flatten()
            .map(|(id, text)| (text.into(), json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0).collect::<Vec<_>>(),
            "pair": sequence("A", 0).chain(sequence("B", 1)).collect::<Vec<_>>(),
            "special_tokens": tokens,
        })
    }
}

/// The special tokens that transformers' tokenizer of this kind has by itself.
fn defaults(model: &str) -> &'static [&'static str] {
    match model {
        "gpt2" => &["<|endoftext|>"],
        "llama" => &["<unk>", "<s>", "</s>"],
        _ => &[],
    }
}

fn byte_level(source: &Vocabulary<'_>, warnings: &mut Vec<String>) -> Result<Json, String> {
    let alphabet = Alphabet::new();
    let spell = |(id, token): (usize, &String)| {
        if alphabet.spells(token) || source.is_special(id) {
            token.clone()
        } else {
            alphabet.spell(token)
        }
    };
    let spelled: Vec<String> = source.tokens.iter().enumerate().map(spell).collect();
    let ids = source.ids(&spelled)?;
    let merges = source.merges(&ids)?.ok_or("has no merges (`tokenizer.ggml.merges`)")?;
    let whole = |id: usize, _| spelled[id] == source.tokens[id];
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": source.added_tokens(&spelled, whole),
        "normalizer": null,
        "pre_tokenizer": byte_level_split(source, warnings)?,
        "post_processor": source.post_processor(),
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": ids, "merges": merges,
        },
    }))
}

fn byte_level_split(source: &Vocabulary<'_>, warnings: &mut Vec<String>) -> Result<Json, String> {
    let name = match source.metadata.get("tokenizer.ggml.pre") {
        Some(Value::Text(name)) => name.as_str(),
        _ => {
            warnings.push(
                "the file does not say how its tokenizer cuts text (`tokenizer.ggml.pre`): GPT-2's \
                 rule is used"
                    .into(),
            );
            "default"
        }
    };
    let split = match name {
        "default" | "gpt-2" | "smollm" => {
            return Ok(json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true,
            }));
        }
        "llama3" | "llama-v3" | "llama-bpe" | "smaug-bpe" | "dbrx" => LLAMA3_SPLIT,
        "qwen2" | "deepseek-r1-qwen" | "megrez" => QWEN2_SPLIT,
        "tekken" => TEKKEN_SPLIT,
        other => {
            return Err(format!("has a tokenizer that cuts text by the unknown rule `{other}`"));
        }
    };
    Ok(json!({
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
             "use_regex": false},
        ],
    }))
}

fn sentencepiece(source: &Vocabulary<'_>) -> Result<Json, String> {
    let ids = source.ids(source.tokens)?;
    let merges = match source.merges(&ids)? {
        Some(merges) => merges,
        None => implied_merges(source, &ids)?,
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": source.added_tokens(source.tokens, |_, _| true),
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false,
        },
        "post_processor": source.post_processor(),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": ids, "merges": merges,
        },
    }))
}

/// The merges that a scored vocabulary implies (transformers' `generate_merges`): every way to cut
/// a token into two tokens, best score first, then longest left part, then longest right part, then
/// the vocabulary's order.
fn implied_merges(
    source: &Vocabulary<'_>,
    ids: &HashMap<String, usize>,
) -> Result<Vec<[String; 2]>, String> {
    let scores = match source.metadata.get("tokenizer.ggml.scores") {
        Some(Value::Floats(scores)) if scores.len() == source.tokens.len() => scores,
        _ => return Err("has neither merges nor a score for every token".into()),
    };
    let mut merges = Vec::new();
    for (token, &score) in source.tokens.iter().zip(scores) {
        if token.len() > TOKEN_LIMIT_BYTES || merges.len() > MERGE_LIMIT {
            return Err("has a vocabulary that implies too many merges".into());
        }
        let mut cuts: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((*ids.get(&token[..at])?, *ids.get(&token[at..])?)))
            .collect();
        cuts.sort_unstable();
        // Adding zero makes the two zeros compare equal, as Python does.
        merges.extend(cuts.into_iter().map(|(left, right)| (score + 0.0, left, right)));
    }
    let lengths: Vec<usize> = source.tokens.iter().map(|t| t.chars().count()).collect();
    merges.sort_by(|a, b| {
        let key = |m: &(f64, usize, usize)| (lengths[m.1], lengths[m.2]);
        b.0.total_cmp(&a.0).then_with(|| key(b).cmp(&key(a)))
    });
    let text = |id: usize| source.tokens[id].clone();
    Ok(merges.into_iter().map(|(_, left, right)| [text(left), text(right)]).collect())
}

#[cfg(test)]
mod tests;
