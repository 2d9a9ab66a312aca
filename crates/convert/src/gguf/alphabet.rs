//! The alphabet in which byte-level vocabularies spell bytes.
//!
//! Definition (GPT-2, Radford et al. 2019): bytes that Latin-1 prints stand for themselves, the
//! others for the characters from U+0100 on, in order.

use std::collections::HashSet;

/// The 256 characters.
#[derive(Debug)]
pub(crate) struct Alphabet {
    spelled: [char; 256],
    letters: HashSet<char>,
}

impl Alphabet {
    pub(crate) fn new() -> Alphabet {
        let mut next = 0x100;
        let mut spelled = ['\0'; 256];
        for byte in 0..=u8::MAX {
            let prints = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            spelled[usize::from(byte)] = if prints {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap_or_default()
            };
        }
        Alphabet { spelled, letters: spelled.into_iter().collect() }
    }

    /// Whether `token` is written in the alphabet.
    pub(crate) fn spells(&self, token: &str) -> bool {
        token.chars().all(|c| self.letters.contains(&c))
    }

    /// `text`'s UTF-8 bytes in the alphabet.
    pub(crate) fn spell(&self, text: &str) -> String {
        text.bytes().map(|byte| self.spelled[usize::from(byte)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_published_letters() {
        let alphabet = Alphabet::new();
        assert_eq!(alphabet.letters.len(), 256);
        assert_eq!(alphabet.spell(" a\n\u{7f}é"), "ĠaĊġÃ©");
        assert!(alphabet.spells("Ġthe") && !alphabet.spells(" the") && !alphabet.spells("▁the"));
    }
}
