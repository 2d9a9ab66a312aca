//! The commands beside training: each opens what it needs, does one thing, prints it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use actors::Forward;
use anyhow::Context;
use compute::ComputeDtype;
use convert::{
    ConvertError, Destination, Dtype, Init, InitTokenizer, Report, export_hf, import_gguf,
    import_hf,
};
use data::Tokenizer;
use model::{Budget, ModelConfig, StateLayout};
use serde_json::json;
use store::{Damage, ReadingStore, show_bytes};

use crate::cli::{
    DataArgs, EvalArgs, ExportArgs, ExportDtype, GenerateArgs, ImportArgs, InitArgs, SpreadArgs,
    StoreArgs,
};
use crate::drives;
use crate::exit::{self, Refused, refuse};
use crate::machine;
use crate::out::{errln, outln};
use crate::progress::ByteBar;
use crate::run_record::RunRecord;
use crate::run_start::{advised, check_untrained};
use crate::text::{self, Sampling};

/// Files that may accompany a tokenizer.json.
const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];

pub(crate) fn init(args: &InitArgs) -> anyhow::Result<ExitCode> {
    let config_json = machine::read_text(&args.config)?;
    let (tokenizer, tokenizer_vocab) = init_tokenizer(&args.tokenizer)?;
    let what = Init { config_json: &config_json, tokenizer, tokenizer_vocab, seed: args.seed };
    let to = destination(&args.store, args.layout, &args.spread)?;
    let bar = ByteBar::new("initialise");
    let made = convert::init(&what, &to, &mut |done, total| bar.at(done, total));
    let report = made.map_err(|error| match error {
        // It names its own file.
        ConvertError::Store(error) => anyhow::Error::new(error),
        error => anyhow::Error::new(error).context(args.config.display().to_string()),
    })?;
    drop(bar);
    say_made(&to, &report);
    Ok(ExitCode::SUCCESS)
}

fn init_tokenizer(named: &str) -> anyhow::Result<(InitTokenizer, usize)> {
    if named == "bytes" {
        let vocab = Tokenizer::bytes().vocab_size() as usize;
        return Ok((InitTokenizer::Bytes(Tokenizer::bytes_json()), vocab));
    }
    let path = Path::new(named);
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
    let tokenizer =
        if path.is_dir() { Tokenizer::load(path)? } else { Tokenizer::from_file(path)? };
    let mut files = Vec::new();
    for name in TOKENIZER_FILES {
        let file = if name == "tokenizer.json" && !path.is_dir() {
            path.to_path_buf()
        } else {
            dir.join(name)
        };
        if file.exists() {
            let bytes = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            files.push((name.to_owned(), bytes));
        }
    }
    Ok((InitTokenizer::Files(files), tokenizer.vocab_size() as usize))
}

pub(crate) fn import(args: &ImportArgs) -> anyhow::Result<ExitCode> {
    check_tokenizer(&args.source)?;
    let to = destination(&args.store, args.layout, &args.spread)?;
    let bar = ByteBar::new("import");
    let mut progress = |done, total| bar.at(done, total);
    let gguf = args.source.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let report = if gguf {
        import_gguf(&args.source, &to, &mut progress)?
    } else {
        import_hf(&args.source, &to, &mut progress)?
    };
    drop(bar);
    say_made(&to, &report);
    Ok(ExitCode::SUCCESS)
}

fn destination<'d>(
    dir: &'d Path,
    layout: StateLayout,
    spread: &SpreadArgs,
) -> anyhow::Result<Destination<'d>> {
    let spread = drives::measured(dir, &spread.spread, None)?;
    Ok(Destination { io: machine::engine(u64::MAX), dir, layout, spread })
}

/// Refuses a model directory whose tokenizer training could not load; what is missing is for the
/// import to say.
fn check_tokenizer(source: &Path) -> anyhow::Result<()> {
    if source.join("tokenizer.json").exists() {
        Tokenizer::load(source)?;
    }
    Ok(())
}

fn say_made(to: &Destination<'_>, report: &Report) {
    let on_disk = 2 * to.layout.bytes(report.parameters as usize) as u64;
    outln!(
        "made {} in {}: {} decoder layers between embedding and head, {} parameters, {} on disk",
        to.dir.display(),
        to.layout,
        report.layers.saturating_sub(2),
        report.parameters,
        show_bytes(on_disk),
    );
    report.ignored.iter().for_each(|name| outln!("left out as redundant: {name}"));
    report.warnings.iter().for_each(|warning| errln!("warning: {warning}"));
    outln!("next: ftactor solo --store {} --data FILE.txt", to.dir.display());
}

pub(crate) fn export(args: &ExportArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    if machine::is_inside(&args.out, store.dir()) {
        return refuse(format!("--out {}: give a directory outside the store", args.out.display()));
    }
    let dtype = match args.dtype {
        ExportDtype::F32 => Dtype::F32,
        ExportDtype::Bf16 => Dtype::BF16,
        ExportDtype::F16 => Dtype::F16,
    };
    let bar = ByteBar::new("export");
    export_hf(&store, &args.out, dtype, &mut |done, total| bar.at(done, total))?;
    drop(bar);
    outln!("exported step {} to {}", store.state().step, args.out.display());
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn inspect(args: &StoreArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    // Other software sees the last commit from now on. A reader may lack the right to write.
    if let Err(error) = store.write_index() {
        tracing::info!(%error, "the index is not rewritten");
    }
    let state = store.state();
    let (snapshots, unusable) = store.snapshots()?;
    unusable.iter().for_each(|why| errln!("warning: {why}"));
    let layers: Vec<_> = store.table().layers().iter().zip(&state.layers).collect();
    if args.json {
        let run: Option<serde_json::Value> =
            store.read_run()?.and_then(|text| serde_json::from_str(&text).ok());
        let layers: Vec<_> = layers
            .iter()
            .map(|(spec, layer)| {
                json!({
                    "name": spec.name,
                    "parameters": spec.elements(),
                    "bytes": store.layout().bytes(spec.elements()),
                    "slot": layer.slot.name(),
                    "t": layer.t,
                    "locked": layer.locked,
                    "grad_norm": finite(layer.grad_norm),
                    "hash": model::hex(store.layer_hash(spec.id)),
                })
            })
            .collect();
        let snapshots: Vec<_> = snapshots
            .iter()
            .map(|snapshot| json!({"name": snapshot.name, "step": snapshot.state.step}))
            .collect();
        outln!(
            "{}",
            json!({
                "run": run,
                "layout": store.layout().name(),
                "step": state.step,
                "loss": finite(state.loss),
                "tokens_total": state.tokens_total,
                "layers": layers,
                "snapshots": snapshots,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    outln!(
        "step {}, loss {:.4}, {} tokens, kept in {}",
        state.step,
        state.loss,
        state.tokens_total,
        store.layout()
    );
    outln!(
        "{:<8} {:>14} {:>10} slot {:>6} {:>12}  {:<16}  ",
        "layer",
        "parameters",
        "bytes",
        "t",
        "grad norm",
        "hash"
    );
    for (spec, layer) in layers {
        outln!(
            "{:<8} {:>14} {:>10} {:<4} {:>6} {:>12.4e}  {:<16}  {}",
            spec.name,
            spec.elements(),
            show_bytes(store.layout().bytes(spec.elements()) as u64),
            layer.slot.name(),
            layer.t,
            layer.grad_norm,
            model::hex(store.layer_hash(spec.id)),
            if layer.locked { "locked" } else { "" },
        );
    }
    for snapshot in snapshots {
        outln!("snapshot {} of step {}", snapshot.name, snapshot.state.step);
    }
    Ok(ExitCode::SUCCESS)
}

/// JSON has no NaN.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

pub(crate) fn verify(args: &StoreArgs) -> anyhow::Result<ExitCode> {
    let io = machine::engine(machine::store_bytes(&args.store));
    let store = told(machine::patiently(|wait| {
        ReadingStore::open_to_verify(Arc::clone(&io), &args.store, wait)
    })?);
    let bar = ByteBar::new("verify");
    let mut damage = store.verify(|done, total| bar.at(done, total))?;
    drop(bar);
    damage.extend(damaged_run(&store)?);
    if args.json {
        let list: Vec<_> = damage
            .iter()
            .map(|d| {
                let (file, healed_by) = (&d.file, &d.healed_by);
                json!({"file": file, "tensor": d.tensor, "offset": d.offset, "healed_by": healed_by})
            })
            .collect();
        outln!("{}", json!({"step": store.state().step, "damage": list}));
    } else if damage.is_empty() {
        outln!("step {}: every byte of the commit matches its hash", store.state().step);
    }
    if damage.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let dir = args.store.display();
    let mut without_remedy = false;
    for d in &damage {
        let inside =
            if d.tensor.is_empty() { String::new() } else { format!(" ({} ..)", d.tensor) };
        errln!("damaged: {}, in the chunk from byte {}{inside}", d.file.display(), d.offset);
        match (d.layer, d.healed_by.last(), &d.snapshot) {
            (Some(layer), Some(version), _) => {
                let layer = &store.table().layer(layer).name;
                errln!(
                    "  an earlier version of it is intact: ftactor rollback --store {dir} {version} --layers {layer}"
                );
            }
            (_, _, Some(snapshot)) => errln!(
                "  the last commit does not need it: ftactor snapshot --store {dir} {snapshot} --remove"
            ),
            _ => without_remedy = true,
        }
    }
    if without_remedy {
        errln!("else put the files back from a copy of the store, or import the model again");
    }
    Ok(ExitCode::from(exit::DAMAGED))
}

/// The store's `run.json` or its run's token rows, if they are lost or damaged; what to do is said.
fn damaged_run(store: &ReadingStore) -> anyhow::Result<Option<Damage>> {
    let damage = |error: anyhow::Error, file: PathBuf| {
        errln!("{error:#}");
        Some(Damage { file, ..Damage::default() })
    };
    let Some(text) = store.read_run()? else {
        let lost = check_untrained(store.dir(), store.state()).err();
        return Ok(lost.and_then(|error| damage(error.into(), store.dir().join("run.json"))));
    };
    let record = match RunRecord::from_json(store.dir(), &text) {
        Ok(record) => record,
        Err(error) => return Ok(damage(error, store.dir().join("run.json"))),
    };
    let file = store.dir().join(&record.rows_file);
    match data::Rows::open_verified(&file) {
        Ok(_) => Ok(None),
        Err(error) => Ok(damage(advised(error), file)),
    }
}

pub(crate) fn generate(args: &GenerateArgs) -> anyhow::Result<ExitCode> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return refuse("--temperature must be a number of at least 0");
    }
    let store = open(&args.store)?;
    store.check_weights()?;
    let config = config(&store)?;
    let tokenizer = Tokenizer::load(&args.store)?;
    let mut forward = forward(&store, &config, args.threads)?;
    if let Some(path) = &args.logits {
        let logits = forward.next_logits(&tokenizer.encode(&args.prompt)?)?;
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        std::fs::write(path, bytes).with_context(|| format!("write {}", path.display()))?;
    }
    let sampling = Sampling {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        seed: args.seed,
        max_positions: config.max_positions,
    };
    let text = text::generate(&mut forward, &tokenizer, &args.prompt, &sampling, &|| false)?;
    if args.json {
        outln!("{}", json!({"prompt": args.prompt, "text": text}));
    } else {
        outln!("{}{text}", args.prompt);
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn eval(args: &EvalArgs) -> anyhow::Result<ExitCode> {
    if args.max_rows == Some(0) {
        return refuse("--max-rows must be at least 1");
    }
    let store = open(&args.store)?;
    store.check_weights()?;
    let config = config(&store)?;
    let rows = rows(&store, &config, &args.data, args.seq_len)?;
    let mut forward = forward(&store, &config, args.threads)?;
    let result = text::evaluate(&mut forward, &rows, args.max_rows, &|| false)?;
    let result = result.unwrap_or_default();
    let loss = result.loss();
    if args.json {
        let (rows, targets) = (result.rows, result.targets);
        outln!(
            "{}",
            json!({"loss": loss, "perplexity": loss.exp(), "rows": rows, "targets": targets})
        );
    } else {
        outln!(
            "loss {loss:.6} perplexity {:.4} over {} targets in {} rows",
            loss.exp(),
            result.targets,
            result.rows
        );
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn data(args: &DataArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    let config = config(&store)?;
    let rows = rows(&store, &config, &args.data, args.seq_len)?;
    let tokenizer = Tokenizer::load(&args.store)?;
    let summary = data::describe(&rows, Some(&tokenizer), args.show)?;
    if args.json {
        outln!("{}", serde_json::to_string(&summary)?);
        return Ok(ExitCode::SUCCESS);
    }
    outln!(
        "{} documents, {} rows of {} tokens, {} targets; {} tokens left over at the end",
        summary.documents,
        summary.rows,
        summary.seq_len,
        summary.targets,
        summary.dropped_tokens
    );
    for row in &summary.first_rows {
        outln!(
            "row {}: {} targets, documents start at {:?}\n{}",
            row.row,
            row.targets,
            row.document_starts,
            row.text
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn open(dir: &Path) -> anyhow::Result<ReadingStore> {
    let io = machine::engine(machine::store_bytes(dir));
    Ok(told(machine::patiently(|wait| ReadingStore::open(Arc::clone(&io), dir, wait))?))
}

/// Passes on what opening found.
fn told(store: ReadingStore) -> ReadingStore {
    machine::tell(store.recovery(), store.state().step);
    store
}

fn config(store: &ReadingStore) -> anyhow::Result<ModelConfig> {
    ModelConfig::from_json(store.config_json())
        .map_err(|e| Refused(format!("{}: {e}", store.dir().display())).into())
}

/// `data` in rows of `seq_len` tokens, else in those of the store's run.
fn rows(
    store: &ReadingStore,
    config: &ModelConfig,
    data: &[PathBuf],
    seq_len: Option<usize>,
) -> anyhow::Result<data::Rows> {
    let run = store.read_run()?.and_then(|text| RunRecord::from_json(store.dir(), &text).ok());
    let of_run = run.map(|run| run.seq_len);
    let seq_len = seq_len.or(of_run).unwrap_or(config.max_positions.min(1024));
    if seq_len > config.max_positions || seq_len < 2 {
        return refuse(format!("--seq-len {seq_len}: expected 2 to {}", config.max_positions));
    }
    text::eval_rows(store.dir(), config, data, seq_len)
}

/// The store's model on the CPU, with a budget for one microbatch of the model's full length.
fn forward<'s>(
    store: &'s ReadingStore,
    config: &ModelConfig,
    threads: Option<usize>,
) -> anyhow::Result<Forward<'s>> {
    let threads = machine::threads(threads)?;
    let budget = Budget::new((machine::available_ram_bytes() / 2) as usize);
    Ok(Forward::new(store, machine::cpu(config, ComputeDtype::F32, &budget, &threads)))
}
