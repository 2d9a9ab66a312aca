//! One line of a `.jsonl` file to the text of one document.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::text::strip_mark;

/// Keys that are not listed are ignored.
#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    prompt: Option<IgnoredAny>,
    completion: Option<IgnoredAny>,
    messages: Option<IgnoredAny>,
}

/// The text of a line; `None` for a blank line; the reason when it has none.
pub(crate) fn parse_line(line: &[u8]) -> Result<Option<String>, String> {
    let line = std::str::from_utf8(line).map_err(|error| error.to_string())?;
    let line = strip_mark(line).trim_matches([' ', '\t', '\r', '\n']);
    if line.is_empty() {
        return Ok(None);
    }
    if !line.starts_with('{') {
        return Err("not a JSON object".to_owned());
    }
    let parsed: Line = serde_json::from_str(line).map_err(|error| reason(&error))?;
    if let Some(text) = parsed.text {
        return Ok(Some(text));
    }
    if parsed.messages.is_some() {
        return Err("\"messages\" is not supported; give {\"text\": ...}".to_owned());
    }
    if parsed.prompt.is_some() || parsed.completion.is_some() {
        let keys = "\"prompt\" and \"completion\" are not supported";
        return Err(format!("{keys}; give {{\"text\": ...}}"));
    }
    Err("no \"text\" in this line".to_owned())
}

/// The parser's reason without its "at line 1", which is wrong here: we know the file's line.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => format!("{}, column {}", &text[..end], error.column()),
        None => text,
    }
}
