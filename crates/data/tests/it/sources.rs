//! Which files the user's paths mean, and what is refused before it is opened.

use std::fs;
use std::path::{Path, PathBuf};

use data::{DataError, ErrorKind, hash_file, list_sources};

use crate::support::Case;

#[test]
fn directories_are_listed_by_name() {
    let case = Case::new(&[
        ("d/b.txt", b"b"),
        ("d/a/z.jsonl", b""),
        ("d/a.TXT", b"a"),
        ("d/notes.md", b""),
    ]);
    let directory = case.directory.path().join("d");
    let listed = list_sources(std::slice::from_ref(&directory)).unwrap();
    let names: Vec<_> = listed.iter().map(|path| path.strip_prefix(&directory).unwrap()).collect();
    assert_eq!(names, [Path::new("a/z.jsonl"), Path::new("a.TXT"), Path::new("b.txt")]);
}

#[test]
fn token_files_in_directories_are_refused_and_not_skipped() {
    let case = Case::new(&[("only/a/b.npy", b""), ("mixed/a.txt", b"a"), ("mixed/sub/b.npy", b"")]);
    for (name, words) in [
        ("only", "only: no .txt or .jsonl file in this directory; .npy files are given by name"),
        ("mixed", "b.npy) in one directory; .npy files are given by name"),
    ] {
        let directory = case.directory.path().join(name);
        let error = list_sources(std::slice::from_ref(&directory)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = error.to_string();
        assert!(text.contains(words) && text.starts_with(directory.to_str().unwrap()), "{text}");
    }
    let named = [&case.paths[1], &case.paths[2]].map(PathBuf::clone);
    assert_eq!(list_sources(&named).unwrap(), named);
}

/// Makes a pipe, a socket, a device behind a link, and a pipe behind a link; none of them ends.
#[cfg(unix)]
fn endless_files(directory: &Path) -> Vec<PathBuf> {
    let paths = ["pipe.txt", "socket.txt", "device.jsonl", "linked.npy"];
    let paths = paths.map(|name| directory.join(name));
    let made = std::process::Command::new("mkfifo").arg(&paths[0]).status().unwrap();
    assert!(made.success());
    std::os::unix::net::UnixListener::bind(&paths[1]).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &paths[2]).unwrap();
    std::os::unix::fs::symlink(&paths[0], &paths[3]).unwrap();
    paths.to_vec()
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_unopened() {
    let case = Case::new(&[("real/a.txt", b"hello")]);
    let endless = endless_files(case.directory.path());
    let (done, waiting) = std::sync::mpsc::channel();
    // Without the refusal these calls never return, and the thread stays behind.
    std::thread::spawn(move || {
        for path in endless {
            let directory = path.with_extension("d");
            fs::create_dir(&directory).unwrap();
            let inside = directory.join(path.file_name().unwrap());
            std::os::unix::fs::symlink(&path, &inside).unwrap();
            done.send((path.clone(), list_sources(std::slice::from_ref(&path)).err())).unwrap();
            done.send((inside, list_sources(&[directory]).err())).unwrap();
            done.send((path.clone(), hash_file(&path).err())).unwrap();
        }
    });
    for _ in 0..4 * 3 {
        let answer = waiting.recv_timeout(std::time::Duration::from_secs(20));
        let (path, error) = answer.expect("a file that never ends was opened");
        let error = error.unwrap_or_else(|| panic!("{} was taken", path.display()));
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(error.to_string(), format!("{} is not a regular file", path.display()));
    }
    let link = case.directory.path().join("link.txt");
    std::os::unix::fs::symlink(&case.paths[0], &link).unwrap();
    assert_eq!(list_sources(std::slice::from_ref(&link)).unwrap(), std::slice::from_ref(&link));
    assert_eq!(hash_file(&link).unwrap(), hash_file(&case.paths[0]).unwrap());
}

#[cfg(unix)]
#[test]
fn a_link_to_nothing_in_a_directory_is_not_skipped() {
    let case = Case::new(&[("d/a.txt", b"a")]);
    let link = case.directory.path().join("d/b.txt");
    std::os::unix::fs::symlink("gone.txt", &link).unwrap();
    let error = list_sources(&[case.directory.path().join("d")]).unwrap_err();
    assert!(matches!(&error, DataError::Io { path, .. } if *path == link), "{error}");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
