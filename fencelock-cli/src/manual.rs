//! What the command says about itself.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::arguments::Arguments;
use crate::exit::{Failure, USAGE};
use crate::say::{print, say, written};

pub(crate) const NO_COMMAND: &str = "there is no command to run: fencelock run NAME -- COMMAND [ARG...]";

/// Answers a request for help, or refuses arguments in one line.
pub(crate) fn answer(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            return match written(error.print().and_then(|()| stdout().flush())) {
                Ok(()) => ExitCode::SUCCESS,
                Err(failure) => {
                    failure.tell();
                    ExitCode::from(failure.code)
                }
            };
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
        }
        _ => say(Failure::usage(in_one_line(error))),
    }
    ExitCode::from(USAGE)
}

fn in_one_line(error: &clap::Error) -> String {
    let lacks_command = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) => {
            missing.len() == 1 && missing[0].starts_with("<COMMAND>")
        }
        _ => false,
    };
    if lacks_command {
        return NO_COMMAND.to_owned();
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut lines = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let mut line = String::new();
    // The first tip is about what may have been meant, the next ones about how to insist.
    for part in lines.by_ref() {
        if let Some(tip) = part.strip_prefix("tip: ") {
            line = format!("{line}; {tip}");
            break;
        }
        line += if line.is_empty() { "" } else { " " };
        line += part.strip_prefix("error: ").unwrap_or(part);
    }
    line + "; see --help"
}

/// Prints the manual page of the whole, or of one command.
pub(crate) fn page(name: Option<&str>) -> Result<ExitCode, Failure> {
    let mut whole = Arguments::command().disable_help_subcommand(true);
    whole.build();
    let command = match name {
        None => whole,
        Some(name) => one(&whole, name)?,
    };
    let mut page = Vec::new();
    Man::new(command)
        .render(&mut page)
        .map_err(|e| Failure::unavailable(format!("the manual page cannot be made: {e}")))?;
    print(&String::from_utf8_lossy(&page))?;
    Ok(ExitCode::SUCCESS)
}

fn one(whole: &Command, name: &str) -> Result<Command, Failure> {
    match whole.find_subcommand(name) {
        Some(command) => {
            let title = format!("fencelock-{name}");
            Ok(command.clone().display_name(title))
        }
        None => {
            let known: Vec<_> = whole.get_subcommands().map(Command::get_name).collect();
            Err(Failure::usage(format!(
                "there is no such command; there are {}",
                known.join(", ")
            )))
        }
    }
}
