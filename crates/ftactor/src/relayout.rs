//! `convert`: a copy of a store in another layout, at the same step of the same run.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use model::{Budget, CHUNK_ELEMENTS};
use serde_json::json;
use store::{NewStore, ReadingStore, show_bytes};

use crate::cli::ConvertArgs;
use crate::drives;
use crate::exit::refuse;
use crate::machine;
use crate::out::{errln, outln};
use crate::progress::ByteBar;
use crate::run_record::RunRecord;

pub(crate) fn convert(args: &ConvertArgs) -> anyhow::Result<ExitCode> {
    let io = machine::engine(machine::store_bytes(&args.store));
    let store = machine::patiently(|wait| ReadingStore::open(Arc::clone(&io), &args.store, wait))?;
    machine::tell(store.recovery(), store.state().step);
    if machine::is_inside(&args.out, store.dir()) {
        return refuse(format!("--out {}: give a directory outside the store", args.out.display()));
    }
    let config_json = convert::config_in(args.layout, store.config_json())
        .with_context(|| format!("config.json of {}", store.dir().display()))?;
    let new = NewStore {
        config_json: &config_json,
        table: store.table(),
        layout: args.layout,
        files: store.model_files()?,
        defaults: store.defaults().clone(),
        spread: drives::measured(&args.out, &args.spread.spread, Some(store.dir()))?,
    };
    let run = store.read_run()?;
    let mut writer = store::create(machine::engine(u64::MAX), &args.out, &new)?;
    let budget = Budget::new(4 * args.layout.bytes(CHUNK_ELEMENTS));
    let bar = ByteBar::new("convert");
    let (mut done, total) = (0, store.layout().bytes(store.table().elements()) as u64);
    for (spec, layer) in store.table().layers().iter().zip(&store.state().layers) {
        for (chunk, hashes) in store.chunk_hashes(spec.id)?.iter().enumerate() {
            let elements = CHUNK_ELEMENTS.min(spec.elements() - chunk * CHUNK_ELEMENTS);
            let read = store.read_chunk(spec.id, chunk, hashes)?;
            let has_moments = layer.t > 0;
            let written = actors::relaid(&read, elements, has_moments, args.layout, &budget)?;
            writer.write_chunk(spec.id, written)?;
            done += store.layout().bytes(elements) as u64;
            bar.at(done, total);
        }
    }
    writer.finish_as(store.state(), run.as_deref())?;
    drop(bar);
    if let Err(error) = copy_rows(&store, run.as_deref(), &args.out) {
        errln!("note: {error:#}; the run goes on with --data, from which they are made again");
    }
    let on_disk = 2 * args.layout.bytes(store.table().elements()) as u64;
    let step = store.state().step;
    if args.json {
        let facts = json!({"step": step, "layout": args.layout.name(), "bytes": on_disk});
        outln!("{facts}");
    } else {
        outln!(
            "made {} in {} of step {step}, {} on disk; {} is as it was",
            args.out.display(),
            args.layout,
            show_bytes(on_disk),
            args.store.display(),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The run's token rows go along, so that it goes on without its data.
fn copy_rows(store: &ReadingStore, run: Option<&str>, out: &Path) -> anyhow::Result<()> {
    let Some(run) = run else { return Ok(()) };
    let file = RunRecord::from_json(store.dir(), run)?.rows_file;
    let (from, to) = (store.dir().join(&file), out.join(&file));
    if from.exists() {
        std::fs::copy(&from, &to)
            .and_then(|_| std::fs::File::open(&to)?.sync_all())
            .with_context(|| format!("token rows: copy {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}
