//! The command line: names, help and examples.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use model::StateLayout;

use crate::options::TrainOptions;

#[derive(Debug, Parser)]
#[command(
    name = "ftactor",
    version,
    about = "Train large language models, all weights, from the disk of one PC",
    after_help = "First steps:\n  ftactor solo --demo\n  ftactor import ./SmolLM2-135M --store ./store\n  \
                  ftactor solo --store ./store --data ./texts --steps 100"
)]
pub(crate) struct Cli {
    /// Write diagnostics as JSON lines (RUST_LOG chooses how many)
    #[arg(long, global = true)]
    pub(crate) log_json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train on this machine; goes on by itself with an unfinished run
    #[command(after_help = "Examples:\n  ftactor solo --demo\n  \
        ftactor solo --store ./store --data ./texts --steps 1000 --lr 1e-5\n  \
        ftactor solo --store ./store          (goes on where the run stopped)")]
    Solo(Box<SoloArgs>),
    /// Make a store with random weights from a config.json
    #[command(
        after_help = "Example:\n  ftactor init --config config.json --store ./store --tokenizer bytes --seed 1"
    )]
    Init(InitArgs),
    /// Make a store from a Hugging Face directory or a GGUF file
    #[command(
        after_help = "Examples:\n  ftactor import ./SmolLM2-135M --store ./store\n  ftactor import model.gguf --store ./store\n  \
        ftactor import ./Llama-8B --store ./store --spread /mnt/second/llama /mnt/third/llama"
    )]
    Import(ImportArgs),
    /// Copy a store into another layout of weights and moments, at the same step of the same run;
    /// snapshots stay behind
    #[command(
        after_help = "Example:\n  ftactor convert --store ./store --layout split8 --out ./store8"
    )]
    Convert(ConvertArgs),
    /// Write the store's weights as a Hugging Face directory
    #[command(after_help = "Example:\n  ftactor export --store ./store --out ./tuned --dtype bf16")]
    Export(ExportArgs),
    /// Show what a store holds
    #[command(after_help = "Example:\n  ftactor inspect --store ./store --json")]
    Inspect(StoreArgs),
    /// Read every byte of weights, moments, snapshots and token rows and compare it with its hash
    #[command(after_help = "Example:\n  ftactor verify --store ./store")]
    Verify(StoreArgs),
    /// Stop training layers: they are read, never changed, and give half of their disk space back
    #[command(after_help = "Example:\n  ftactor lock --store ./store embed,0-11")]
    Lock(LayersArgs),
    /// Train layers again
    #[command(after_help = "Example:\n  ftactor unlock --store ./store 8-11,head")]
    Unlock(LayersArgs),
    /// Keep the last commit under a name; nothing is copied
    #[command(after_help = "Examples:\n  ftactor snapshot --store ./store before-night\n  \
        ftactor snapshot --store ./store before-night --remove")]
    Snapshot(SnapshotArgs),
    /// Go back to a snapshot, or to the commit before the last
    #[command(after_help = "Examples:\n  ftactor rollback --store ./store before-night\n  \
        ftactor rollback --store ./store previous          (once more undoes it)\n  \
        ftactor rollback --store ./store before-night --layers 3,8-11")]
    Rollback(RollbackArgs),
    /// Let the store's model continue a text
    #[command(
        after_help = "Example:\n  ftactor generate --store ./store --prompt 'Once upon a time' --max-tokens 50"
    )]
    Generate(GenerateArgs),
    /// Loss and perplexity of the store's model on data
    #[command(after_help = "Example:\n  ftactor eval --store ./store --data held-out.txt")]
    Eval(EvalArgs),
    /// Show how data is understood: documents, rows, tokens, targets
    #[command(after_help = "Example:\n  ftactor data --store ./store --data ./texts")]
    Data(DataArgs),
    /// What training a model would ask of disk and RAM, layouts side by side, before anything is allocated
    #[command(after_help = "Examples:\n  ftactor plan --size 7b --ram 12G --batch-rows 32\n  \
        ftactor plan --store ./store --compute-dtype bf16\n  ftactor plan --config config.json --json")]
    Plan(Box<PlanArgs>),
    /// Measure disk, processor and memory, and write the profile that `plan` reads
    #[command(after_help = "Example:\n  ftactor bench --store ./store --out profile.toml")]
    Bench(BenchArgs),
    /// Check equivalence, persistence and convergence on this machine
    #[command(after_help = "Example:\n  ftactor selftest")]
    Selftest(SelftestArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SoloArgs {
    /// The store to train
    #[arg(long, value_name = "DIR", required_unless_present_any = ["demo", "print_config"])]
    pub(crate) store: Option<PathBuf>,
    /// Self-contained: make a small model and corpus, train on the CPU, show samples
    #[arg(long)]
    pub(crate) demo: bool,
    /// Text (.txt, .jsonl), token files (.npy) or directories of texts
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// One tile of weights and one chunk of state at a time: what reading ahead is worth
    #[arg(long, hide = true)]
    pub(crate) no_prefetch: bool,
    #[command(flatten)]
    pub(crate) options: TrainOptions,
    /// Options from a TOML file; flags win
    #[arg(long = "options", value_name = "FILE")]
    pub(crate) options_file: Option<PathBuf>,
    /// Print every option's effective value as TOML for --options and stop
    #[arg(long)]
    pub(crate) print_config: bool,
    /// Keep the weights, zero the moments, start a new run
    #[arg(long)]
    pub(crate) new_run: bool,
    /// Print the closing summary and errors only
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Print each step as a JSON line on standard output instead of a progress bar
    #[arg(long)]
    pub(crate) json: bool,
    /// Start again by itself after a kill, a crash or a failed disk, from the last committed step
    #[arg(long, requires = "store", conflicts_with_all = ["demo", "print_config"])]
    pub(crate) supervise: bool,
    /// Seconds that an actor may always take for an answer; later, and beyond all it took before, the
    /// process ends with code 5 [default: 120]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) stuck_after: Option<u64>,
    /// Failure injection, for tests: POINT:WHAT:N, e.g. compute:panic:7, io.sync:eio:3; again for more
    #[arg(long, value_name = "SPEC", hide = true)]
    pub(crate) fault: Vec<actors::Fault>,
}

const LAYOUT_HELP: &str = "How weights and Adam moments are kept: f32 (24 bytes a parameter on disk), \
    split (the same bits, weights as a bfloat16 plane and the rest), split8 (float32 weights, 8-bit \
    moments, 12 bytes), bf16sr8 (bfloat16 weights, rounded stochastically, 8-bit moments, 8 bytes)";

/// Where the layers of a new store go.
#[derive(Debug, Args)]
pub(crate) struct SpreadArgs {
    /// Directories on other drives, new or empty, over which layers are spread as well, by measured rate
    #[arg(long, value_name = "DIR", num_args = 1..)]
    pub(crate) spread: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// A Hugging Face config.json; model_type and sizes suffice
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// The store to make: a directory, new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// A tokenizer.json, a directory that holds one, or `bytes`
    #[arg(long, value_name = "PATH|bytes", default_value = "bytes")]
    pub(crate) tokenizer: String,
    /// Of the random weights
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    #[arg(long, value_name = "LAYOUT", default_value_t, help = LAYOUT_HELP)]
    pub(crate) layout: StateLayout,
    #[command(flatten)]
    pub(crate) spread: SpreadArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// A Hugging Face directory or FILE.gguf
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,
    /// The store to make: a directory, new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    #[arg(long, value_name = "LAYOUT", default_value_t, help = LAYOUT_HELP)]
    pub(crate) layout: StateLayout,
    #[command(flatten)]
    pub(crate) spread: SpreadArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The store to copy
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    #[arg(long, value_name = "LAYOUT", help = LAYOUT_HELP)]
    pub(crate) layout: StateLayout,
    /// The store to make: a directory, new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) spread: SpreadArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The store whose last commit is written
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// The directory to make, outside the store
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Number format of the weights
    #[arg(long, value_enum, default_value_t = ExportDtype::F32)]
    pub(crate) dtype: ExportDtype,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum ExportDtype {
    F32,
    Bf16,
    F16,
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LayersArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// e.g. embed,0-11,head
    #[arg(value_name = "LAYERS")]
    pub(crate) layers: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Remove the snapshot of this name instead
    #[arg(long)]
    pub(crate) remove: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// A snapshot, or the commit before the last
    #[arg(value_name = "NAME|previous")]
    pub(crate) name: String,
    /// Only these, e.g. embed,0-11,head: their contents and Adam steps, not the run's step
    #[arg(long, value_name = "LAYERS")]
    pub(crate) layers: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: String,
    /// Tokens to write at most
    #[arg(long, default_value_t = 64)]
    pub(crate) max_tokens: usize,
    /// Write the logits behind the prompt to this file, as float32, for comparisons
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) logits: Option<PathBuf>,
    /// 0 takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Of the random choices
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Threads for products [default: all cores]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Text (.txt, .jsonl), token files (.npy) or directories of texts
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// Tokens of a row [default: the run's, else the smaller of 1024 and the model's maximum]
    #[arg(long)]
    pub(crate) seq_len: Option<usize>,
    /// At most this many rows
    #[arg(long)]
    pub(crate) max_rows: Option<u64>,
    /// Threads for products [default: all cores]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    /// The store
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Text (.txt, .jsonl), token files (.npy) or directories of texts
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// Tokens of a row [default: the run's, else the smaller of 1024 and the model's maximum]
    #[arg(long)]
    pub(crate) seq_len: Option<usize>,
    /// Rows to show decoded
    #[arg(long, default_value_t = 2)]
    pub(crate) show: u64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A directory on the disk to measure, a store or the place for one [default: here]
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Where the profile goes
    #[arg(long, value_name = "FILE", default_value = "profile.toml")]
    pub(crate) out: PathBuf,
    /// Size of the file that is written and read: beyond a drive's own cache it says more
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub(crate) disk_bytes: String,
    /// Tokens of the two rows that layers are measured with
    #[arg(long, default_value_t = 512, hide = true, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) row_tokens: u64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A store that is there
    #[arg(long, value_name = "DIR", group = "subject")]
    pub(crate) store: Option<PathBuf>,
    /// A Hugging Face config.json
    #[arg(long, value_name = "FILE", group = "subject")]
    pub(crate) config: Option<PathBuf>,
    /// Llama's shape of this size, e.g. 7b or 70b
    #[arg(long, value_name = "SIZE", group = "subject")]
    pub(crate) size: Option<String>,
    /// Only this layout [default: the store's, or all]
    #[arg(long, value_name = "LAYOUT")]
    pub(crate) layout: Option<StateLayout>,
    /// What `bench` wrote: adds seconds
    #[arg(long, value_name = "FILE")]
    pub(crate) hardware: Option<PathBuf>,
    /// Terabytes that the drive is rated to take
    #[arg(long, value_name = "TB", default_value_t = 1200.0)]
    pub(crate) tbw: f64,
    #[command(flatten)]
    pub(crate) options: TrainOptions,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SelftestArgs {
    /// The device to test
    #[arg(long, value_enum, default_value_t = crate::options::DeviceChoice::Auto)]
    pub(crate) device: crate::options::DeviceChoice,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
