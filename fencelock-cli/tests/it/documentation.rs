//! docs/troubleshooting.md against the code: no entry is missing, and none is about something that the code no longer has.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fencelock::{ENV, LockError, LockName, Locks, MemoryLock, Mode};

use crate::world::World;

const PAGE: &str = include_str!("../../../docs/troubleshooting.md");
const README: &str = include_str!("../../README.md");
const ERRORS: &str = include_str!("../../../lock-core/src/error.rs");
const LOSSES: &str = include_str!("../../../lock-core/src/loss.rs");
const EXIT_CODES: &str = include_str!("../../src/exit.rs");

/// The rows of all tables of the page whose first column has that title.
fn rows<'a>(page: &'a str, title: &str) -> Vec<Vec<&'a str>> {
    let mut rows = Vec::new();
    let mut in_table = false;
    let mut wanted = false;
    for line in page.lines() {
        let Some(row) = line.strip_prefix('|') else {
            in_table = false;
            continue;
        };
        let row: Vec<_> = row.trim_end_matches('|').split('|').map(str::trim).collect();
        if !in_table {
            in_table = true;
            wanted = row[0] == title;
        } else if wanted && !row[0].starts_with("---") {
            rows.push(row);
        }
    }
    assert!(!rows.is_empty(), "there is no table whose first column is {title:?}");
    rows
}

fn code_spans(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// The variants of an enum, each with the lines between the one before it and its name.
fn variants(source: &str, name: &str) -> Vec<(String, String)> {
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let mut variants = Vec::new();
    let mut before = String::new();
    for line in body.lines() {
        let item = line.strip_prefix("    ").unwrap_or(line);
        if item.starts_with(|c: char| c.is_ascii_uppercase()) {
            let end = item.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(item.len());
            variants.push((format!("{name}::{}", &item[..end]), std::mem::take(&mut before)));
        } else {
            before += line;
            before.push('\n');
        }
    }
    variants
}

fn names(variants: Vec<(String, String)>) -> BTreeSet<String> {
    variants.into_iter().map(|(name, _)| name).collect()
}

/// The entries of a table whose first cell is one code span.
fn entries(title: &str) -> BTreeSet<String> {
    let rows = rows(PAGE, title);
    let entries: BTreeSet<_> = rows.iter().map(|row| code_spans(row[0]).concat()).collect();
    assert_eq!(entries.len(), rows.len(), "an entry stands there twice");
    entries
}

#[test]
fn every_error_and_every_reason_of_a_loss_has_its_entry() {
    assert_eq!(entries("variant"), names(variants(ERRORS, "LockError")));
    assert_eq!(entries("reason"), names(variants(LOSSES, "LossReason")));
}

#[test]
fn the_texts_of_losses_are_those_of_the_code() {
    let variants = variants(LOSSES, "LossReason");
    for row in rows(PAGE, "reason") {
        let (_, before) = variants.iter().find(|(name, _)| row[0] == format!("`{name}`")).unwrap();
        let attribute = format!("#[error(\"{}\")]", code_spans(row[1]).concat());
        assert!(before.contains(&attribute), "{} does not say {attribute}", row[0]);
    }
}

#[tokio::test]
async fn whether_a_retry_can_help_is_what_the_code_says() {
    let memory = MemoryLock::new();
    let locks = Locks::new(memory.client());
    let name: LockName = "a".parse().unwrap();
    let guard = locks.lock("lost").await.unwrap();
    memory.steal(guard.name());
    let errors = [
        LockError::timed_out(&name, Duration::ZERO, None),
        LockError::unavailable("acquire", "no answer"),
        guard.renew_now().await.unwrap_err(),
        "".parse::<LockName>().unwrap_err().into(),
        locks.lock("a").ttl(Duration::ZERO).await.unwrap_err(),
        LockError::invalid_mode(&name, Mode::Shared, Mode::Permit { of: 2 }),
        LockError::deadlock("deadlock detected"),
        LockError::unsafe_configuration("unsafe"),
        LockError::configuration("wrong"),
        LockError::not_supported("renewal"),
        LockError::closed(),
    ];
    let variant_of = |error: &LockError| match error {
        LockError::TimedOut { .. } => "TimedOut",
        LockError::Unavailable { .. } => "Unavailable",
        LockError::Lost { .. } => "Lost",
        LockError::InvalidName { .. } => "InvalidName",
        LockError::InvalidTtl { .. } => "InvalidTtl",
        LockError::InvalidMode { .. } => "InvalidMode",
        LockError::Deadlock { .. } => "Deadlock",
        LockError::UnsafeConfiguration { .. } => "UnsafeConfiguration",
        LockError::Configuration { .. } => "Configuration",
        LockError::NotSupported { .. } => "NotSupported",
        LockError::Closed { .. } => "Closed",
        _ => "one that this test does not know",
    };
    assert!(PAGE.contains("| variant | meaning | held | retry |"));
    for row in rows(PAGE, "variant") {
        let variant = row[0].trim_matches('`').replace("LockError::", "");
        let error = errors.iter().find(|error| variant_of(error) == variant);
        let error = error.unwrap_or_else(|| panic!("add a {variant} to the errors of this test"));
        let retry = if error.is_retryable() { "yes" } else { "no" };
        assert_eq!(row[3], retry, "{variant}");
        assert_eq!(error.is_busy(), variant == "TimedOut", "{variant}");
    }
}

/// All codes that the command ends with by itself.
fn exit_codes() -> BTreeSet<u8> {
    let constants = EXIT_CODES
        .lines()
        .filter_map(|line| line.strip_prefix("pub(crate) const "));
    let codes: BTreeSet<u8> = constants
        .map(|constant| {
            let (_, value) = constant.split_once(": u8 = ").unwrap();
            value.trim_end_matches(';').parse().unwrap()
        })
        .collect();
    assert!(codes.len() >= 9, "{codes:?}");
    codes
}

#[test]
fn every_exit_code_has_its_entry() {
    for (page, title, file) in [
        (PAGE, "code", "docs/troubleshooting.md"),
        (README, "exit code", "fencelock-cli/README.md"),
    ] {
        let rows = rows(page, title);
        let cells: Vec<_> = rows.iter().flat_map(|row| row[0].split(", ")).collect();
        let codes: BTreeSet<u8> = cells.iter().filter_map(|cell| cell.parse().ok()).collect();
        assert_eq!(codes, exit_codes(), "{file}");
        for other in ["the command's", "128 + n"] {
            assert!(cells.contains(&other), "{file} lacks {other:?}");
        }
    }
    let help = World::new().run(["run", "--help"]).stdout;
    let (_, shown) = help.split_once("Exit codes:").unwrap();
    let numbers = shown
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.parse::<u8>().ok());
    for code in numbers.filter(|code| ![0, 128].contains(code)) {
        assert!(exit_codes().contains(&code), "{code}");
    }
}

#[test]
fn exit_codes_have_names() {
    for (path, source) in sources(Path::new(env!("CARGO_MANIFEST_DIR"))) {
        for call in ["ExitCode::from(", "Failure::new(", "Failure::remark("] {
            for (at, _) in source.match_indices(call) {
                let argument = source[at + call.len()..].trim_start();
                assert!(
                    !argument.starts_with(|c: char| c.is_ascii_digit()),
                    "{path}: {call} with a number that exit.rs does not name"
                );
            }
        }
        for other in ["ExitCode::FAILURE", "process::exit("] {
            assert!(!source.contains(other), "{path}: {other}");
        }
    }
}

/// The sources of a crate: without comments and unit tests, string literals in one line and without escapes.
fn sources(package: &Path) -> Vec<(String, String)> {
    let mut sources = Vec::new();
    let mut folders = vec![package.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let (code, _) = text.split_once("#[cfg(test)]\nmod tests").unwrap_or((&text, ""));
                let code: Vec<_> = code
                    .lines()
                    .filter(|line| !line.trim_start().starts_with("//"))
                    .collect();
                let literals: Vec<_> = code
                    .join("\n")
                    .split("\\\n")
                    .map(|line| line.trim_start().to_owned())
                    .collect();
                let code = literals.concat().replace("\\\"", "\"").replace("{ENV}", ENV);
                sources.push((path.display().to_string(), code));
            }
        }
    }
    sources
}

#[test]
fn the_messages_are_those_of_the_code() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let packages = [
        "fencelock",
        "fencelock-cli",
        "lock-core",
        "lock-etcd",
        "lock-postgres",
        "lock-redis",
        "lock-sqlite",
        "lock-transport",
    ];
    let sources: Vec<_> = packages
        .iter()
        .flat_map(|package| sources(&repository.join(package)))
        .collect();
    let rows = rows(PAGE, "message");
    let messages: Vec<_> = rows.iter().flat_map(|row| code_spans(row[0])).collect();
    assert!(messages.len() >= rows.len(), "a message is not a code span");
    for message in messages {
        let parts: Vec<_> = message.split("...").map(str::trim).collect();
        let in_order = |source: &str| {
            let end = parts
                .iter()
                .try_fold(0, |at, part| Some(at + source[at..].find(*part)? + part.len()));
            end.is_some()
        };
        assert!(
            parts.iter().all(|part| part.len() >= 10),
            "{message:?} is too short to be found by"
        );
        assert!(
            sources.iter().any(|(_, source)| in_order(source)),
            "no code says {message:?}"
        );
    }
}
