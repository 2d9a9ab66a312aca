//! Names of layers as users give them: `embed,0-11,head`.

use model::{LayerId, LayerTable};

use crate::exit::{Refused, refuse};

/// The layers that `text` names, ascending, each once.
pub(crate) fn parse(text: &str, table: &LayerTable) -> anyhow::Result<Vec<LayerId>> {
    let mut chosen = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.split_once('-') {
            None => chosen.push(find(part, table)?),
            Some((first, last)) => {
                let (first, last) = (find(first, table)?, find(last, table)?);
                if first > last {
                    return refuse(format!("layers `{part}`: the first comes after the last"));
                }
                chosen.extend((first.0..=last.0).map(LayerId));
            }
        }
    }
    chosen.sort();
    chosen.dedup();
    if chosen.is_empty() { refuse("no layer is named; e.g. embed,0-11,head") } else { Ok(chosen) }
}

fn find(name: &str, table: &LayerTable) -> anyhow::Result<LayerId> {
    let layer = table.layers().iter().find(|layer| layer.name == name.trim());
    let unknown = || {
        let last = table.len().saturating_sub(3);
        Refused(format!("there is no layer `{name}`: there are embed, 0 to {last}, and head"))
    };
    Ok(layer.ok_or_else(unknown)?.id)
}

/// The layers' names, joined as [`parse`] takes them.
pub(crate) fn names(layers: &[LayerId], table: &LayerTable) -> String {
    let names: Vec<&str> = layers.iter().map(|&id| table.layer(id).name.as_str()).collect();
    names.join(",")
}

#[cfg(test)]
mod tests {
    use model::ModelConfig;

    use super::*;

    fn table() -> LayerTable {
        let config = r#"{"model_type":"llama","vocab_size":9,"hidden_size":8,"intermediate_size":8,
            "num_hidden_layers":12,"num_attention_heads":2}"#;
        LayerTable::new(&ModelConfig::from_json(config).unwrap())
    }

    #[test]
    fn names_and_ranges_are_understood_or_refused() {
        let ids = |text: &str| -> anyhow::Result<Vec<u32>> {
            Ok(parse(text, &table())?.iter().map(|id| id.0).collect())
        };
        let known: [(&str, Vec<u32>); 5] = [
            ("embed", vec![0]),
            ("head, 0", vec![1, 13]),
            ("embed,0-3,2-4", vec![0, 1, 2, 3, 4, 5]),
            ("11-head", vec![12, 13]),
            ("embed-head", (0..14).collect()),
        ];
        for (text, expected) in known {
            assert_eq!(ids(text).unwrap(), expected, "{text}");
        }
        for wrong in ["", ",", "12", "x", "3-1", "0-", "-1", "0-99", "all"] {
            assert!(ids(wrong).is_err(), "{wrong}");
        }
        assert_eq!(names(&parse("head,0", &table()).unwrap(), &table()), "0,head");
    }
}
