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
    print(&with_names(shell, &String::from_utf8_lossy(&script)))?;
    Ok(ExitCode::SUCCESS)
}

fn with_names(shell: Shell, script: &str) -> String {
    match shell {
        Shell::Bash => script.to_owned() + include_str!("completions/names.bash"),
        Shell::Fish => script.to_owned() + include_str!("completions/names.fish"),
        Shell::Zsh => in_zsh(script),
        _ => script.to_owned(),
    }
}

/// In zsh it is an argument's description that names the function which completes it.
fn in_zsh(script: &str) -> String {
    let is_name = |line: &str| line.starts_with("':name -- ") || line.starts_with("'::prefix -- ");
    let lines = script.lines().map(|line| match line.strip_suffix(":_default' \\") {
        Some(argument) if is_name(line) => format!("{argument}:_fencelock_held' \\\n"),
        _ => format!("{line}\n"),
    });
    let lines: String = lines.collect();
    lines.replacen(
        "_fencelock() {\n",
        &(include_str!("completions/names.zsh").to_owned() + "_fencelock() {\n"),
        1,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zsh_completes_names_of_locks_in_each_command_that_takes_one() {
        let mut script = Vec::new();
        clap_complete::generate(Shell::Zsh, &mut Arguments::command(), "fencelock", &mut script);
        let script = in_zsh(&String::from_utf8(script).unwrap());
        assert_eq!(script.matches(":_fencelock_held' \\\n").count(), 4);
        assert_eq!(script.matches("_fencelock_held() {").count(), 1);
        assert!(script.starts_with("#compdef fencelock\n"));
    }
}
