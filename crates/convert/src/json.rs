//! JSON objects that keep the order and the exact text of their members.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The members of an object in the order of the text; a name given twice is an error.
#[derive(Debug)]
pub(crate) struct Object<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Object<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members(PhantomData))
    }
}

struct Members<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for Members<V> {
    type Value = Object<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<V>, A::Error> {
        let mut members = Vec::new();
        let mut names = HashSet::new();
        while let Some((name, value)) = map.next_entry::<String, V>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("`{name}` is there twice")));
            }
            members.push((name, value));
        }
        Ok(Object(members))
    }
}

/// The text of a `config.json` with its `dtype` (and `torch_dtype`, where it has one) set to
/// `dtype`; every other member keeps its text.
pub(crate) fn with_dtype(config: &str, dtype: &str) -> Result<String, serde_json::Error> {
    let Object(members) = serde_json::from_str::<Object<&RawValue>>(config)?;
    let value = format!("\"{dtype}\"");
    let mut lines: Vec<(String, String)> = members
        .into_iter()
        .map(|(name, raw)| match name.as_str() {
            "dtype" | "torch_dtype" => (name, value.clone()),
            _ => (name, raw.get().to_string()),
        })
        .collect();
    if !lines.iter().any(|(name, _)| name == "dtype" || name == "torch_dtype") {
        lines.push(("dtype".into(), value));
    }
    let lines: Vec<String> = lines
        .iter()
        .map(|(name, value)| Ok(format!("  {}: {value}", serde_json::to_string(name)?)))
        .collect::<Result<_, serde_json::Error>>()?;
    Ok(format!("{{\n{}\n}}\n", lines.join(",\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_dtype_changes() {
        let text = r#"{"b": 9.999999747378752e-06, "torch_dtype": "bfloat16", "a": [1,  2]}"#;
        assert_eq!(
            with_dtype(text, "float32").unwrap(),
            "{\n  \"b\": 9.999999747378752e-06,\n  \"torch_dtype\": \"float32\",\n  \"a\": [1,  2]\n}\n"
        );
        assert!(with_dtype("{}", "float16").unwrap().contains("\"dtype\": \"float16\""));
    }

    #[test]
    fn names_given_twice_are_refused() {
        assert!(with_dtype(r#"{"a": 1, "a": 2}"#, "float32").is_err());
        assert!(with_dtype("[]", "float32").is_err());
    }
}
