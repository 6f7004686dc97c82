//! What the command says about itself: help, manual pages, completions for shells.

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::exit::{Failure, USAGE};
use crate::output::{print, written};

pub(crate) const NO_COMMAND: &str = "there is no command to run: fencelock run NAME -- COMMAND [ARG...]";

/// Answers a request for help, or refuses arguments in one line.
pub(crate) fn answer(error: &clap::Error) -> Result<ExitCode, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => written(error.print()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Ok(ExitCode::from(USAGE))
        }
        _ => Err(Failure::usage(in_one_line(error))),
    }
}

fn in_one_line(error: &clap::Error) -> String {
    if let (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
        && missing.len() == 1
        && missing[0].starts_with("<COMMAND>")
    {
        return NO_COMMAND.to_owned();
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut said = Vec::new();
    for line in lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information")) {
        // The first tip is about what may have been meant, the next ones about how to insist.
        if let Some(tip) = line.strip_prefix("tip: ") {
            return format!("{}; {tip}; see --help", said.join(" "));
        }
        said.push(line.strip_prefix("error: ").unwrap_or(line));
    }
    said.join(" ") + "; see --help"
}

/// Prints the manual page of the whole, or of one command.
pub(crate) fn page(name: Option<&str>) -> Result<ExitCode, Failure> {
    let mut whole = Cli::command().disable_help_subcommand(true);
    whole.build();
    let command = match name.map(|name| (name, whole.find_subcommand(name))) {
        None => whole,
        Some((name, Some(command))) => command.clone().display_name(format!("fencelock-{name}")),
        Some((_, None)) => {
            let known: Vec<_> = whole.get_subcommands().map(Command::get_name).collect();
            let known = known.join(", ");
            return Err(Failure::usage(format!("there is no such command; there are {known}")));
        }
    };
    let mut page = Vec::new();
    let rendered = Man::new(command).render(&mut page);
    rendered.map_err(|error| Failure::unavailable(format!("the manual page cannot be made: {error}")))?;
    print(&String::from_utf8_lossy(&page))
}

/// Prints completions for a shell: those that clap makes, with the names of locks that are held and with the command of `fencelock run`.
pub(crate) fn completions(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "fencelock", &mut script);
    let script = String::from_utf8_lossy(&script);
    print(&match shell {
        Shell::Bash => script + include_str!("completions/names.bash"),
        Shell::Fish => script + include_str!("completions/names.fish"),
        Shell::Zsh => in_zsh(&script).into(),
        _ => script,
    })
}

/// In zsh it is an argument's description that names the function which completes it.
fn in_zsh(script: &str) -> String {
    let is_name = |line: &str| line.starts_with("':name -- ") || line.starts_with("'::prefix -- ");
    let lines = script.lines().map(|line| match line.strip_suffix(":_default' \\") {
        Some(argument) if is_name(line) => format!("{argument}:_fencelock_held' \\\n"),
        _ => format!("{line}\n"),
    });
    let own = include_str!("completions/names.zsh").to_owned() + "_fencelock() {\n";
    lines.collect::<String>().replacen("_fencelock() {\n", &own, 1)
}
