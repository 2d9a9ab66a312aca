//! 8-bit codes against an independent reading of the paper; tests/golden/codes.py wrote the numbers.

use optim::{CODE_BLOCK, InstructionSet, SIGNED, UNSIGNED};
use serde_json::Value;

fn golden(name: &str) -> Value {
    let all: Value = serde_json::from_str(include_str!("../golden/codes.json")).unwrap();
    all[name].clone()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

#[test]
fn numbers_codes_and_scales_are_the_published_ones() {
    for (name, code) in [("signed", &*SIGNED), ("unsigned", &*UNSIGNED)] {
        let golden = golden(name);
        let numbers = floats(&golden["numbers"]);
        assert_eq!(numbers.len(), 256);
        for (ours, theirs) in code.numbers().iter().zip(&numbers) {
            assert!((f64::from(*ours) - theirs).abs() <= theirs.abs() * 6e-8, "{ours} {theirs}");
        }
        let bits = golden["bits"].as_array().unwrap().iter();
        let values: Vec<f32> =
            bits.map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32)).collect();
        let want: Vec<u8> = floats(&golden["codes"]).into_iter().map(|code| code as u8).collect();
        let want_scales: Vec<f32> =
            floats(&golden["scales"]).into_iter().map(|scale| scale as f32).collect();
        for set in InstructionSet::available() {
            let mut codes = vec![0; values.len()];
            let mut scales = vec![0.0; values.len().div_ceil(CODE_BLOCK)];
            set.encode(code, &values, &mut codes, &mut scales);
            assert_eq!((&codes, &scales), (&want, &want_scales), "{name} {set}");
            let mut back = vec![0.0; values.len()];
            set.decode(code, &codes, &scales, &mut back);
            for (at, (back, code)) in back.iter().zip(&codes).enumerate() {
                let want = numbers[usize::from(*code)] * f64::from(scales[at / CODE_BLOCK]);
                assert!((f64::from(*back) - want).abs() <= want.abs() * 2e-7, "{name} {set} {at}");
            }
        }
    }
}

#[test]
fn a_block_of_zeros_comes_back_as_zeros() {
    for code in [&*SIGNED, &*UNSIGNED] {
        let (mut codes, mut scales) = ([7; 300], [1.0; 2]);
        code.encode(&[0.0; 300], &mut codes, &mut scales);
        assert_eq!(scales, [0.0; 2]);
        let mut back = [1.0; 300];
        code.decode(&codes, &scales, &mut back);
        assert_eq!(back, [0.0; 300]);
        // What a fresh file of zero bytes says.
        code.decode(&[0; 300], &scales, &mut back);
        assert!(back.iter().all(|value| *value == 0.0));
    }
}
