//! Damage: logs cut and flipped at every byte, state files flipped, files missing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use store::{Image, Io, Memory, StoreError};

use crate::support::{DIR, assert_contents, fresh_image, open, read, train_step};

/// A store with three commits in one log, and where each of the log's records ends.
fn trained() -> (Image, [PathBuf; 2], Vec<usize>) {
    let memory = Arc::new(Memory::from_image(fresh_image()));
    let io: Arc<dyn Io> = memory.clone();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let paths =
        ["log", "mirror"].map(|copy| Path::new(DIR).join(format!("commit/00000002.{copy}")));
    let mut ends = vec![memory.image().files[&paths[0]].len()];
    for _ in 0..3 {
        train_step(&store).unwrap();
        ends.push(memory.image().files[&paths[0]].len());
    }
    drop(store);
    (memory.image(), paths, ends)
}

/// What opening for training must give.
enum Expect {
    Step(u64),
    Damaged,
}

fn check(image: &Image, expect: &Expect, place: &str) {
    let memory = Arc::new(Memory::from_image(image.clone()));
    let io: Arc<dyn Io> = memory.clone();
    match (open(&io, Path::new(DIR)), expect) {
        (Ok((store, _)), Expect::Step(step)) => assert_contents(&store, *step),
        (Err(StoreError::Damaged { .. }), Expect::Damaged) => {
            assert!(memory.image() == *image, "{place}: something was written");
        }
        (Ok((store, _)), Expect::Damaged) => panic!("{place}: opened at {}", store.state().step),
        (Err(error), _) => panic!("{place}: {error}"),
    }
}

#[test]
fn a_log_cut_anywhere_gives_the_step_before_or_is_damaged() {
    let (image, paths, ends) = trained();
    for cut in 0..ends[3] {
        let mut image = image.clone();
        for path in &paths {
            image.files.get_mut(path).unwrap().truncate(cut);
        }
        // Step 3 overwrote the slots of step 1, so only the last record can be cut.
        let expect = if cut >= ends[2] { Expect::Step(2) } else { Expect::Damaged };
        check(&image, &expect, &format!("cut at {cut}"));
        let mut one = image.clone();
        one.files.insert(paths[0].clone(), trained_copy(&image, &paths));
        check_one_copy(one, &paths, cut, &ends);
    }
}

fn trained_copy(image: &Image, paths: &[PathBuf; 2]) -> Vec<u8> {
    image.files[&paths[1]].clone()
}

/// One copy is whole, the other cut: nothing is lost.
fn check_one_copy(mut image: Image, paths: &[PathBuf; 2], cut: usize, ends: &[usize]) {
    let (whole, _, _) = trained();
    for side in 0..2 {
        image.files.insert(paths[side].clone(), whole.files[&paths[side]].clone());
        image.files.get_mut(&paths[1 - side]).unwrap().truncate(cut.min(ends[3]));
        check(&image, &Expect::Step(3), &format!("copy {side} whole, other cut at {cut}"));
    }
}

#[test]
fn a_flipped_byte_in_both_copies_is_cut_only_at_the_end() {
    let (image, paths, ends) = trained();
    for at in 0..ends[3] {
        let mut flipped = image.clone();
        for path in &paths {
            flipped.files.get_mut(path).unwrap()[at] ^= 0x10;
        }
        let expect = if at >= ends[2] { Expect::Step(2) } else { Expect::Damaged };
        check(&flipped, &expect, &format!("flip at {at}"));
        // Behind magic and length, it is told from a torn append.
        if at >= ends[2] + 8 {
            let io: Arc<dyn Io> = Arc::new(Memory::from_image(flipped));
            let recovery = read(&io, Path::new(DIR)).unwrap().recovery().clone();
            assert!(recovery.cut.is_some_and(|cut| cut.rotten), "flip at {at}");
        }
    }
}

#[test]
fn a_flipped_byte_in_one_copy_is_outvoted_and_reported() {
    let (image, paths, ends) = trained();
    for at in 0..ends[3] {
        for path in &paths {
            let mut flipped = image.clone();
            flipped.files.get_mut(path).unwrap()[at] ^= 0x01;
            check(&flipped, &Expect::Step(3), &format!("flip at {at}"));
            let io: Arc<dyn Io> = Arc::new(Memory::from_image(flipped));
            let (_, recovery) = open(&io, Path::new(DIR)).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(recovery.warnings.iter().any(|w| w.contains(name)), "{at} {recovery:?}");
        }
    }
}

#[test]
fn a_missing_copy_is_replaced_and_reported() {
    let (image, paths, _) = trained();
    for path in &paths {
        let mut one = image.clone();
        one.files.remove(path);
        let memory = Arc::new(Memory::from_image(one));
        let io: Arc<dyn Io> = memory.clone();
        let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
        assert_contents(&store, 3);
        assert!(recovery.warnings.iter().any(|w| w.contains("is missing")), "{recovery:?}");
        let logs =
            memory.image().files.keys().filter(|p| p.starts_with("/disk/store/commit")).count();
        assert_eq!(logs, 2);
    }
}

#[test]
fn a_torn_append_is_cut_reported_and_the_slots_are_checked() {
    let (image, paths, ends) = trained();
    let mut torn = image.clone();
    for path in &paths {
        torn.files.get_mut(path).unwrap().truncate(ends[3] - 1);
    }
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(torn.clone()));
    let (_, recovery) = open(&io, Path::new(DIR)).unwrap();
    assert!(recovery.checked);
    let cut = recovery.cut.unwrap();
    assert_eq!((cut.offset, cut.rotten), (ends[2] as u64, false));
    // The same with damage in a slot that the last whole record names.
    let slot = Path::new(DIR).join("layers/0/a/exp_avg.safetensors");
    *torn.files.get_mut(&slot).unwrap().last_mut().unwrap() ^= 1;
    check(&torn, &Expect::Damaged, "torn with a damaged slot");
}

#[test]
fn verify_names_file_tensor_and_offset() {
    let (image, _, _) = trained();
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
    let mut last = (0, 1);
    let store = read(&io, Path::new(DIR)).unwrap();
    assert_eq!(store.verify(|done, total| last = (done, total)).unwrap(), []);
    assert_eq!(last, (last.1, store.table().elements() as u64 * 12));
    for (index, layer) in store.table().layers().iter().enumerate() {
        let slot = store.state().layers[index].slot.name();
        let dir = Path::new(DIR).join("layers").join(&layer.name).join(slot);
        for file in ["weight.safetensors", "exp_avg_sq.safetensors", "hashes"] {
            let mut flipped = image.clone();
            let path = dir.join(file);
            *flipped.files.get_mut(&path).unwrap().last_mut().unwrap() ^= 4;
            let io: Arc<dyn Io> = Arc::new(Memory::from_image(flipped.clone()));
            let damage = read(&io, Path::new(DIR)).unwrap().verify(|_, _| {}).unwrap();
            assert_eq!(damage.len(), 1, "{damage:?}");
            assert_eq!(damage[0].file, path);
            if file == "hashes" {
                check(&flipped, &Expect::Damaged, "hashes");
            } else {
                assert_eq!(damage[0].tensor, layer.tensors[0].name);
                assert_eq!(damage[0].offset, 4096);
            }
        }
    }
}

#[test]
fn headers_lengths_and_missing_files_are_checked_at_open() {
    let (image, _, _) = trained();
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
    let live = read(&io, Path::new(DIR)).unwrap().state().layers.last().unwrap().slot;
    for (slot, expect) in [(live, Expect::Damaged), (live.other(), Expect::Step(3))] {
        let path = format!("layers/head/{}/weight.safetensors", slot.name());
        check_slot_file(&image, &Path::new(DIR).join(path), &expect);
    }
}

/// Of an inactive slot nothing is needed: it is made anew when it is written.
fn check_slot_file(image: &Image, path: &Path, expect: &Expect) {
    for (what, change) in [
        ("length", Box::new(|file: &mut Vec<u8>| file.push(0)) as Box<dyn Fn(&mut Vec<u8>)>),
        ("short", Box::new(|file: &mut Vec<u8>| file.truncate(5))),
        ("header length", Box::new(|file: &mut Vec<u8>| file[5] = 0xff)),
        ("header", Box::new(|file: &mut Vec<u8>| file[60] ^= 1)),
    ] {
        let mut broken = image.clone();
        change(broken.files.get_mut(path).unwrap());
        check(&broken, expect, what);
    }
    let mut broken = image.clone();
    broken.files.remove(path);
    check(&broken, expect, "missing");
    if let Expect::Step(step) = expect {
        broken.dirs.remove(path.parent().unwrap());
        broken.files.retain(|file, _| file.parent() != path.parent());
        let io: Arc<dyn Io> = Arc::new(Memory::from_image(broken));
        let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
        let told = |w: &String| w.contains("is missing") && w.contains("made anew");
        assert!(recovery.warnings.iter().any(told), "{recovery:?}");
        assert!(store.room().unwrap().needed > 16 << 20);
        train_step(&store).unwrap();
        assert_contents(&store, step + 1);
        assert_eq!(store.room().unwrap().needed, 16 << 20);
    }
}

#[test]
fn unknown_versions_and_dtypes_are_refused_by_name() {
    let (image, _, _) = trained();
    let path = Path::new(DIR).join("store.json");
    for (from, to, named) in [
        ("\"format_version\":1", "\"format_version\":9", "version 9"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"Q9\"", "Q9"),
        ("\"block\":1", "\"block\":64", "64"),
        ("\"plane\":\"exp_avg\"", "\"plane\":\"hi\"", "hi"),
        ("xxh3-64", "crc", "crc"),
    ] {
        let mut newer = image.clone();
        let text = String::from_utf8(newer.files[&path].clone()).unwrap();
        assert!(text.contains(from), "{from}");
        newer.files.insert(path.clone(), text.replace(from, to).into_bytes());
        let io: Arc<dyn Io> = Arc::new(Memory::from_image(newer));
        let error = open(&io, Path::new(DIR)).unwrap_err();
        assert!(matches!(&error, StoreError::Invalid(text) if text.contains(named)), "{error}");
    }
}

/// Opens for training and for reading, which must agree; nothing may be written.
fn errors(image: &Image) -> [StoreError; 2] {
    let memory = Arc::new(Memory::from_image(image.clone()));
    let io: Arc<dyn Io> = memory.clone();
    let errors =
        [open(&io, Path::new(DIR)).unwrap_err(), read(&io, Path::new(DIR)).map(drop).unwrap_err()];
    assert!(memory.image() == *image, "something was written");
    errors
}

fn assert_damaged(image: &Image, name: &str, what: &str) {
    for error in errors(image) {
        let StoreError::Damaged { file, .. } = &error else { panic!("{name}: {error}") };
        assert!(file.ends_with(name) && error.to_string().contains(what), "{error}");
    }
}

#[test]
fn check_weights_finds_damaged_weights_and_hashes_only() {
    let (image, _, _) = trained();
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
    let state = read(&io, Path::new(DIR)).unwrap().state().clone();
    read(&io, Path::new(DIR)).unwrap().check_weights().unwrap();
    let slot = Path::new(DIR).join("layers/1").join(state.layers[2].slot.name());
    let other = Path::new(DIR).join("layers/1").join(state.layers[2].slot.other().name());
    for (file, is_found) in [
        (slot.join("weight.safetensors"), true),
        (slot.join("hashes"), true),
        (slot.join("exp_avg.safetensors"), false),
        (other.join("weight.safetensors"), false),
    ] {
        let mut flipped = image.clone();
        *flipped.files.get_mut(&file).unwrap().last_mut().unwrap() ^= 4;
        let io: Arc<dyn Io> = Arc::new(Memory::from_image(flipped));
        match read(&io, Path::new(DIR)).unwrap().check_weights() {
            Ok(()) => assert!(!is_found, "{}", file.display()),
            Err(StoreError::Damaged { file: found, .. }) => assert!(is_found && found == file),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_trained_store_without_its_log_is_damaged_not_unfinished() {
    let (mut image, _, _) = trained();
    let commit = Path::new(DIR).join("commit");
    image.files.insert(Path::new(DIR).join("run.json"), b"{}".to_vec());
    image.files.retain(|path, _| !path.starts_with(&commit));
    assert_damaged(&image, "commit", "layers/ are untouched");
    image.dirs.remove(&commit);
    assert_damaged(&image, "commit", "restore it from a copy");
}

#[test]
fn a_config_that_is_not_the_stores_own_is_damage() {
    let (image, _, _) = trained();
    let path = Path::new(DIR).join("config.json");
    let layout = Path::new(DIR).join("store.json");
    let mut old = image.clone();
    let text = String::from_utf8(image.files[&layout].clone()).unwrap();
    let start = text.find("\"config_hash\"").unwrap();
    let end = start + text[start..].find(',').unwrap() + 1;
    old.files.insert(layout, format!("{}{}", &text[..start], &text[end..]).into_bytes());
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(old.clone()));
    assert_contents(&open(&io, Path::new(DIR)).unwrap().0, 3);
    for image in [&image, &old] {
        let config = String::from_utf8(image.files[&path].clone()).unwrap();
        for (from, to) in [
            ("\"num_hidden_layers\":2", "\"num_hidden_layers\":16777216"),
            ("\"vocab_size\":40", "\"vocab_size\":41"),
            ("\"num_attention_heads\":2", "\"num_attention_heads\":16777216"),
            ("\"model_type\":\"llama\"", "\"model_type\":\"qwen2\""),
            ("{", ""),
        ] {
            let mut edited = image.clone();
            assert!(config.contains(from), "{from}");
            edited.files.insert(path.clone(), config.replacen(from, to, 1).into_bytes());
            assert_damaged(&edited, "config.json", "the layers in store.json");
        }
        let mut missing = image.clone();
        missing.files.remove(&path);
        assert_damaged(&missing, "config.json", "is missing; restore it");
    }
    // The same layers, computed in another way.
    let mut edited = image.clone();
    let config = String::from_utf8(image.files[&path].clone()).unwrap();
    let config = config.replacen('{', "{\"rope_theta\":20000,", 1);
    edited.files.insert(path, config.into_bytes());
    assert_damaged(&edited, "config.json", "not the text that the store was created with");
}

#[test]
fn a_layout_that_no_version_wrote_is_damaged() {
    let (image, _, _) = trained();
    let path = Path::new(DIR).join("store.json");
    let text = String::from_utf8(image.files[&path].clone()).unwrap();
    let lacking = text.replacen("\"chunk_bytes\"", "\"chunk\"", 1);
    for text in ["", "{\"format_version\":1", "{}", "{\"format_version\":1}", &lacking] {
        let mut broken = image.clone();
        broken.files.insert(path.clone(), text.into());
        assert_damaged(&broken, "store.json", "");
    }
}

#[test]
fn a_directory_in_the_place_of_a_file_is_damage() {
    let (image, _, _) = trained();
    let layer = Path::new(DIR).join("layers/0");
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
    let live = layer.join(read(&io, Path::new(DIR)).unwrap().state().layers[1].slot.name());
    for path in [live.join("weight.safetensors"), live.join("hashes")] {
        let mut broken = image.clone();
        broken.files.remove(&path);
        broken.dirs.insert(path.clone());
        assert_damaged(&broken, path.file_name().unwrap().to_str().unwrap(), "is a directory");
    }
}
