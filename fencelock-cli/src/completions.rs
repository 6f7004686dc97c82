//! Completions for shells: those that clap makes, with the names of locks that are held and with the command of `fencelock run`.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::arguments::Arguments;
use crate::exit::Failure;
use crate::say::print;

/// Prints completions for a shell.
pub(crate) fn completions(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "fencelock", &mut script);
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
