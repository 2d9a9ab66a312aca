//! `plan`: what training a model asks of a machine, before anything is allocated.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use model::{LayerTable, Limits, ModelConfig, StateLayout, Tiling};
use schedule::{Policy, StepBytes, StepPlan, Updates};
use serde_json::json;
use store::{ReadingStore, show_bytes};

use crate::cli::PlanArgs;
use crate::exit::{self, Refused, refuse};
use crate::layers;
use crate::machine;
use crate::options::{TrainOptions, show_ram};
use crate::out::{errln, outln};
use crate::profile::Profile;
use crate::run_record::{Defaults, RunRecord};
use crate::run_start::{self, How};
use crate::shapes::Shape;

/// Llama's shapes by their usual names.
const SHAPES: [(&str, Shape); 9] = [
    ("135m", Shape::new((576, 1536), 30, (9, 3), 49_152, true)),
    ("360m", Shape::new((960, 2560), 32, (15, 5), 49_152, true)),
    ("1b", Shape::new((2048, 8192), 16, (32, 8), 128_256, true)),
    ("1.7b", Shape::new((2048, 8192), 24, (32, 32), 49_152, true)),
    ("3b", Shape::new((3072, 8192), 28, (24, 8), 128_256, true)),
    ("7b", Shape::new((4096, 11_008), 32, (32, 32), 32_000, false)),
    ("8b", Shape::new((4096, 14_336), 32, (32, 8), 128_256, false)),
    ("13b", Shape::new((5120, 13_824), 40, (40, 40), 32_000, false)),
    ("70b", Shape::new((8192, 28_672), 80, (64, 8), 128_256, false)),
];

pub(crate) fn plan(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let mut subject = Subject::of(args)?;
    if let Some(layers) = &args.options.lock {
        let layers = layers::parse(layers, &subject.table)?;
        layers.iter().for_each(|layer| subject.locked[layer.index()] = true);
    }
    if !subject.locked.contains(&false) {
        return refuse("all layers are locked: nothing would be trained");
    }
    if !(args.tbw.is_finite() && args.tbw > 0.0) {
        return refuse(format!("--tbw {}: expected terabytes above 0, e.g. 1200", args.tbw));
    }
    let ram_bytes = run_start::ram_bytes(&args.options)?;
    let options = subject.options(&args.options)?;
    let steps = options.steps.unwrap_or(1);
    let record = RunRecord::new(&options, subject.defaults, steps, Vec::new(), String::new())?;
    let layouts = match args.layout.or(subject.layout) {
        Some(layout) => vec![layout],
        None => StateLayout::ALL.to_vec(),
    };
    let profile = args.hardware.as_deref().map(Profile::read).transpose()?;
    if let Some(other) = profile.as_ref().filter(|profile| !profile.is_of_this_machine()) {
        errln!("note: the profile is of another machine ({})", other.machine);
    }
    let goes_on = subject.goes_on(&args.options)?;
    let ask = Ask { options: &options, goes_on, ram_bytes, tbw: args.tbw, profile };
    let rows = layouts
        .into_iter()
        .map(|layout| Row::new(&subject, &record, &ask, layout))
        .collect::<anyhow::Result<Vec<Row>>>()?;
    let shape = record.shape();
    let fits = rows.iter().any(|row| row.fit.is_ok());
    let code = if fits { ExitCode::SUCCESS } else { ExitCode::from(exit::NOT_ENOUGH) };
    if args.json {
        let layouts: Vec<_> = rows.iter().map(Row::json).collect();
        outln!(
            "{}",
            json!({
                "model": subject.name,
                "parameters": subject.table.elements(),
                "tokens_per_step": shape.step_tokens(),
                "compute_dtype": record.compute_dtype,
                "ram_bytes": ram_bytes,
                "layouts": layouts,
            })
        );
        return Ok(code);
    }
    outln!(
        "{}: {} parameters, {} tokens a step ({} x {}), products in {}, {} of RAM",
        subject.name,
        subject.table.elements(),
        shape.step_tokens(),
        shape.batch_rows,
        shape.seq_len,
        record.compute_dtype,
        show_ram(ram_bytes as u64),
    );
    outln!(
        "{:<8} {:>10} {:>10} {:>11} {:>11} {:>13}  how",
        "layout",
        "disk",
        "least RAM",
        "read/step",
        "written",
        format!("{} TBW", args.tbw)
    );
    rows.iter().for_each(|row| outln!("{row}"));
    for row in &rows {
        match &row.fit {
            Err(why) => outln!("{}: {why}", row.layout),
            Ok(Fit { seldom: Some(why), .. }) => outln!("{}: {why}", row.layout),
            Ok(_) => {}
        }
    }
    Ok(code)
}

/// What is planned for.
struct Subject {
    name: String,
    config: ModelConfig,
    table: LayerTable,
    /// Of a store that is there.
    layout: Option<StateLayout>,
    defaults: Defaults,
    locked: Vec<bool>,
    /// Of a store that has one.
    run: Option<RunRecord>,
}

impl Subject {
    /// Those of its run, where nothing else is given.
    fn options(&self, given: &TrainOptions) -> anyhow::Result<TrainOptions> {
        let Some(run) = &self.run else { return Ok(given.clone()) };
        let mut of_run = run.options()?;
        if given.batch_rows.is_some() || given.seq_len.is_some() {
            of_run.micro_rows = None;
        }
        given.over(&of_run)
    }

    /// Whether what is planned is the rest of its run.
    fn goes_on(&self, given: &TrainOptions) -> anyhow::Result<bool> {
        let Some(run) = &self.run else { return Ok(false) };
        Ok(run.differences(given)?.is_empty())
    }

    fn of(args: &PlanArgs) -> anyhow::Result<Subject> {
        match (&args.store, &args.config, &args.size) {
            (Some(dir), _, _) => Subject::of_store(dir),
            (None, Some(file), _) => {
                let config = ModelConfig::from_json(&machine::read_text(file)?)
                    .with_context(|| file.display().to_string())?;
                Ok(Subject::of_config(file.display().to_string(), config))
            }
            (None, None, Some(size)) => {
                let shape = SHAPES.iter().find(|(name, _)| name.eq_ignore_ascii_case(size));
                let Some((_, shape)) = shape else {
                    let known: Vec<&str> = SHAPES.iter().map(|(name, _)| *name).collect();
                    return refuse(format!(
                        "--size {size}: expected one of {}; others from --config FILE",
                        known.join(", ")
                    ));
                };
                Ok(Subject::of_config(format!("Llama's shape of {size}"), shape.config()?))
            }
            (None, None, None) => refuse("give --store DIR, --config FILE or --size 7b"),
        }
    }

    fn of_store(dir: &Path) -> anyhow::Result<Subject> {
        let io = machine::engine(machine::store_bytes(dir));
        let store = ReadingStore::open(io, dir, machine::LOCK_WAIT)?;
        let config = ModelConfig::from_json(store.config_json())
            .map_err(|e| Refused(format!("{}: {e}", dir.display())))?;
        let locked = store.state().layers.iter().map(|layer| layer.locked).collect();
        let defaults = run_start::defaults(&config, store.defaults());
        let layout = Some(store.layout());
        let run = store.read_run()?.map(|text| RunRecord::from_json(dir, &text)).transpose()?;
        if run.is_none() {
            run_start::check_untrained(dir, store.state())?;
        }
        let name = dir.display().to_string();
        Ok(Subject { layout, defaults, locked, run, ..Subject::of_config(name, config) })
    }

    fn of_config(name: String, config: ModelConfig) -> Subject {
        let table = LayerTable::new(&config);
        let defaults = Defaults { max_positions: config.max_positions, lr: 1e-5 };
        let locked = vec![false; table.len()];
        Subject { name, config, table, layout: None, defaults, locked, run: None }
    }
}

/// What is asked besides the model.
struct Ask<'a> {
    options: &'a TrainOptions,
    goes_on: bool,
    ram_bytes: usize,
    tbw: f64,
    profile: Option<Profile>,
}

/// One layout's line.
struct Row {
    layout: StateLayout,
    /// Both slots of every layer.
    disk: u64,
    least_ram: u64,
    fit: Result<Fit, String>,
    tbw: f64,
}

/// What a step comes to within the RAM that is given.
struct Fit {
    bytes: StepBytes,
    updates: Updates,
    scratch: u64,
    spilled: usize,
    parked: usize,
    tiling: Tiling,
    flops: f64,
    /// With a profile.
    seconds: Option<Seconds>,
    tokens: usize,
    steps: Option<u64>,
    /// Why commits that are made seldom are no gain.
    seldom: Option<String>,
}

/// Of a step.
#[derive(Clone, Copy)]
struct Seconds {
    compute: f64,
    optimizer: f64,
    disk: f64,
}

impl Seconds {
    /// The processor computes and updates by turns, the disk works beside it.
    fn step(self) -> f64 {
        self.processor().max(self.disk)
    }

    fn processor(self) -> f64 {
        self.compute + self.optimizer
    }

    fn binds(self) -> &'static str {
        if self.disk > self.processor() { "disk" } else { "processor" }
    }

    /// Tokens a step from which on the disk is no longer what a step waits for.
    fn tokens_beyond_the_disk(self, tokens: usize) -> f64 {
        (self.disk - self.optimizer).max(0.0) / (self.compute / tokens as f64)
    }
}

impl Row {
    fn new(
        subject: &Subject,
        record: &RunRecord,
        ask: &Ask<'_>,
        layout: StateLayout,
    ) -> anyhow::Result<Row> {
        let updates = record.updates(ask.options.update)?;
        let within = |ram_bytes| {
            let state = (&subject.table, layout);
            let (interval, goes_on) = (ask.options.recompute_interval(), ask.goes_on);
            let how = How { updates, interval, goes_on };
            run_start::limits(state, &subject.config, record, how, ram_bytes)
        };
        let least_ram = match within(0) {
            Ok(_) => 0,
            Err(error) => needed(&error)?,
        };
        let fit = within(ask.ram_bytes).map_err(|error| format!("{error:#}"));
        Ok(Row {
            layout,
            disk: 2 * layout.bytes(subject.table.elements()) as u64,
            least_ram,
            fit: fit.map(|limits| Fit::new(subject, record, (updates, ask), layout, &limits)),
            tbw: ask.tbw,
        })
    }

    /// Steps after which a drive that is rated for so many terabytes has written them.
    fn steps_of_a_drive(&self) -> Option<f64> {
        let fit = self.fit.as_ref().ok()?;
        Some(self.tbw * 1e12 / fit.bytes.written.max(1) as f64)
    }

    fn json(&self) -> serde_json::Value {
        let fit = self.fit.as_ref();
        let fit_json = fit.map(|fit| {
            json!({
                "asked_bytes": fit.bytes.read,
                "read_bytes": fit.bytes.read_from_disk(),
                "written_bytes": fit.bytes.written,
                "scratch_bytes": fit.scratch,
                "layers_with_gradients_on_disk": fit.spilled,
                "inputs_on_disk": fit.parked,
                "decoder_layers": match fit.tiling {
                    Tiling::Whole => "whole",
                    Tiling::Blocks => "in blocks",
                },
                "update": update_name(fit.updates),
                "product_flops": fit.flops,
                "steps_until_rated_writes": self.steps_of_a_drive(),
                "seconds": fit.seconds.map(|seconds| json!({
                    "step": seconds.step(),
                    "compute": seconds.compute,
                    "optimizer": seconds.optimizer,
                    "disk": seconds.disk,
                    "binds": seconds.binds(),
                    "tokens_beyond_the_disk": seconds.tokens_beyond_the_disk(fit.tokens),
                    "run": fit.steps.map(|steps| steps as f64 * seconds.step()),
                })),
            })
        });
        json!({
            "layout": self.layout.name(),
            "disk_bytes": self.disk,
            "least_ram_bytes": self.least_ram,
            "step": fit_json.unwrap_or_default(),
            "refused": fit.err(),
            "note": fit.ok().and_then(|fit| fit.seldom.as_ref()),
        })
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Row { layout, disk, least_ram, fit, .. } = self;
        let (disk, least) = (show_bytes(*disk), show_ram(*least_ram));
        write!(out, "{:<8} {disk:>10} {least:>10} ", layout.name())?;
        let Ok(fit) = fit else { return write!(out, "does not fit the RAM") };
        let (read, written) =
            (show_bytes(fit.bytes.read_from_disk()), show_bytes(fit.bytes.written));
        let steps = self.steps_of_a_drive().unwrap_or(0.0);
        write!(out, "{read:>11} {written:>11} {steps:>7.0} steps  ")?;
        write!(out, "{}", update_name(fit.updates))?;
        match (fit.spilled, fit.parked) {
            (0, 0) => {}
            (0, parked) => write!(out, ", {parked} inputs of layers wait on the disk")?,
            (spilled, 0) => write!(out, ", gradients of {spilled} layers wait on the disk")?,
            (spilled, parked) => write!(
                out,
                ", gradients of {spilled} layers and {parked} inputs of layers wait on the disk"
            )?,
        }
        if fit.tiling == Tiling::Blocks {
            write!(out, ", layers in halves (attention, feed-forward)")?;
        }
        let Some(seconds) = fit.seconds else { return Ok(()) };
        write!(
            out,
            "\n         {:.1} s a step ({:.1} computing, {:.1} updating; disk {:.1} beside it): bound by the {}",
            seconds.step(),
            seconds.compute,
            seconds.optimizer,
            seconds.disk,
            seconds.binds()
        )?;
        write!(
            out,
            "; from {:.0} tokens a step on the disk does not matter",
            seconds.tokens_beyond_the_disk(fit.tokens)
        )?;
        if let Some(steps) = fit.steps {
            let all = Duration::from_secs_f64((steps as f64 * seconds.step()).min(1e12));
            write!(out, "; {steps} steps take {}", indicatif::HumanDuration(all))?;
        }
        Ok(())
    }
}

impl Fit {
    fn new(
        subject: &Subject,
        record: &RunRecord,
        (updates, ask): (Updates, &Ask<'_>),
        layout: StateLayout,
        limits: &Limits,
    ) -> Fit {
        let (state, when) = ((&subject.table, layout), (updates, ask.options.commit_every()));
        let plan = run_start::step_plan(state, record, limits, when, &subject.locked);
        let of_layers = |flags: &[bool]| flags.iter().filter(|flag| **flag).count();
        let spilled = match plan.policy {
            Policy::Deferred => of_layers(&limits.spilled),
            // What a tied embedding gets from the head.
            Policy::Fused => usize::from(limits.spilled[0]),
        };
        let seconds = ask.profile.as_ref().and_then(|p| seconds(p, &plan, record, subject));
        Fit {
            seconds,
            tokens: record.shape().step_tokens(),
            steps: ask.options.steps,
            bytes: plan.bytes(),
            updates: run_start::settled(updates, limits, plan.commit_every),
            seldom: run_start::seldom_for_nothing(state, record, limits, when, &subject.locked),
            scratch: actors::scratch_bytes(limits, record.shape().micros()),
            spilled,
            parked: limits.parked_groups().count(),
            tiling: limits.tiling,
            flops: plan.product_flops(),
        }
    }
}

/// What a profile makes of a step; `None` where it lacks a rate.
fn seconds(
    profile: &Profile,
    plan: &StepPlan<'_>,
    record: &RunRecord,
    subject: &Subject,
) -> Option<Seconds> {
    let layers = subject.table.layers().iter().zip(&subject.locked);
    let trained: usize = layers.filter(|(_, locked)| !**locked).map(|(l, _)| l.elements()).sum();
    let bytes = plan.bytes();
    // What the page cache can hold is written to the disk, but not read from it.
    let state = 2 * plan.layout.bytes(subject.table.elements()) as u64;
    let read = if machine::is_cacheable(state) { 0.0 } else { bytes.read_from_disk() as f64 };
    let (written, disk) = (bytes.written as f64, &profile.disk);
    let flops = profile.flops(record.dtype(), subject.config.hidden_size)?;
    Some(Seconds {
        compute: plan.product_flops() / flops,
        optimizer: trained as f64 / profile.parameters(plan.layout)?,
        disk: (read / disk.read).max(written / disk.write).max((read + written) / disk.both),
    })
}

fn update_name(updates: Updates) -> &'static str {
    match updates {
        Updates::Always(Policy::Fused) => "fused",
        Updates::Always(Policy::Deferred) => "deferred",
        Updates::Speculative => "speculative",
        Updates::Auto => "speculative while little is clipped",
    }
}

/// The bytes that a refusal of memory asks for.
fn needed(error: &anyhow::Error) -> anyhow::Result<u64> {
    match error.downcast_ref::<model::BudgetError>() {
        Some(model::BudgetError::TooSmall { needed_bytes, .. }) => Ok(*needed_bytes),
        _ => Err(anyhow::anyhow!("{error:#}")),
    }
}
