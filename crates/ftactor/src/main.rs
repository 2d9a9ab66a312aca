//! The `ftactor` command: parses, wires the rooms together, and turns errors into exit codes.

mod bench;
mod cli;
mod commands;
mod corpus;
mod demo;
mod drives;
mod effective;
mod exit;
mod history;
mod interrupt;
mod layers;
mod log;
mod machine;
mod new_run;
mod options;
mod out;
mod plan;
mod profile;
mod progress;
mod relayout;
mod run_record;
mod run_start;
mod selftest;
mod shapes;
mod snapshots;
mod solo;
mod supervise;
mod text;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::usage(&error),
    };
    telemetry::init_tracing(cli.log_json);
    match run(cli) {
        Ok(_) if out::is_lost() => exit::output_lost(),
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Solo(args) => solo::run(&args),
        Command::Init(args) => commands::init(&args),
        Command::Import(args) => commands::import(&args),
        Command::Convert(args) => relayout::convert(&args),
        Command::Export(args) => commands::export(&args),
        Command::Inspect(args) => commands::inspect(&args),
        Command::Verify(args) => commands::verify(&args),
        Command::Lock(args) => history::lock(&args),
        Command::Unlock(args) => history::unlock(&args),
        Command::Snapshot(args) => history::snapshot(&args),
        Command::Rollback(args) => history::rollback(&args),
        Command::Generate(args) => commands::generate(&args),
        Command::Eval(args) => commands::eval(&args),
        Command::Data(args) => commands::data(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Selftest(args) => selftest::run(&args),
    }
}
