//! A small corpus of English-like sentences, generated: the demo needs no download.

use crate::text::Random;

const WHO: [&str; 10] = [
    "the fox",
    "a sailor",
    "the old miller",
    "my sister",
    "the baker",
    "a small owl",
    "the gardener",
    "our teacher",
    "the night train",
    "a grey cat",
];
const DID: [&str; 10] = [
    "carried",
    "found",
    "painted",
    "remembered",
    "watched",
    "repaired",
    "borrowed",
    "followed",
    "counted",
    "forgot",
];
const WHAT: [&str; 10] = [
    "a red lantern",
    "the broken clock",
    "seven apples",
    "the road to the harbour",
    "an empty boat",
    "the letter",
    "a song about rain",
    "the key of the mill",
    "two wooden chairs",
    "the first snow",
];
const WHEN: [&str; 8] = [
    "before breakfast",
    "in the evening",
    "after the storm",
    "on the last day of summer",
    "while the others slept",
    "at the market",
    "under the bridge",
    "without a word",
];
const THEN: [&str; 6] = [
    "and smiled",
    "and went home",
    "because it was late",
    "and nobody asked why",
    "for a friend",
    "once more",
];

/// About `bytes` bytes of text; the same for the same seed.
pub(crate) fn sentences(seed: u64, bytes: usize) -> String {
    let mut random = Random(seed);
    let mut text = String::with_capacity(bytes + 128);
    while text.len() < bytes {
        let start = text.len();
        let who = *random.pick(&WHO);
        text.push_str(&who[..1].to_uppercase());
        text.push_str(&who[1..]);
        for part in [random.pick(&DID), random.pick(&WHAT), random.pick(&WHEN)] {
            text.push(' ');
            text.push_str(part);
        }
        if random.unit() < 0.5 {
            text.push(' ');
            text.push_str(random.pick::<&str>(&THEN));
        }
        text.push_str(if random.unit() < 0.2 { ".\n" } else { ". " });
        debug_assert!(text.len() > start);
    }
    text
}
