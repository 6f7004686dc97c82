//! docs/troubleshooting.md against the code: no entry is missing, and none is about something that the code no longer has.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fencelock::{ENV, LockError, LockName, Locks, LossReason, MemoryLock, Mode};

use crate::world::World;

const PAGE: &str = include_str!("../../../docs/troubleshooting.md");
const README: &str = include_str!("../../README.md");
const ERRORS: &str = include_str!("../../../lock-core/src/error.rs");
const LOSSES: &str = include_str!("../../../lock-core/src/loss.rs");
const EXIT_CODES: &str = include_str!("../../src/exit.rs");

/// The rows of all tables of the page whose first column has that title.
fn rows<'a>(page: &'a str, title: &str) -> Vec<Vec<&'a str>> {
    let tables = page.split("\n\n").map(str::trim);
    let tables = tables.filter(|table| table.starts_with(&format!("| {title} |")));
    let rows = tables.flat_map(|table| table.lines().skip(2));
    let rows: Vec<_> = rows
        .map(|row| row.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(!rows.is_empty(), "there is no table whose first column is {title:?}");
    rows
}

fn code_spans(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// The variants of an enum.
fn variants(source: &str, name: &str) -> BTreeSet<String> {
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let items = body.lines().filter_map(|line| line.strip_prefix("    "));
    let variants = items.filter(|item| item.starts_with(|c: char| c.is_ascii_uppercase()));
    let end = |item: &str| item.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(item.len());
    variants.map(|item| format!("{name}::{}", &item[..end(item)])).collect()
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
    assert_eq!(entries("variant"), variants(ERRORS, "LockError"));
    assert_eq!(entries("reason"), variants(LOSSES, "LossReason"));
}

#[test]
fn the_texts_of_losses_are_those_of_the_code() {
    let reasons = [
        LossReason::Expired,
        LossReason::NotHeld,
        LossReason::Revoked,
        LossReason::MaxHold,
        LossReason::Shutdown,
        LossReason::Released,
        LossReason::RuntimeEnded,
    ];
    let texts = reasons.map(|reason| [format!("`LossReason::{reason:?}`"), format!("`{reason}`")]);
    let rows = rows(PAGE, "reason");
    assert_eq!(rows.len(), texts.len());
    for text in texts {
        assert!(rows.iter().any(|row| row[..2] == text), "{text:?}");
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
        assert_eq!(row[3] == "yes", error.is_retryable(), "{variant}");
        assert_eq!(error.is_busy(), variant == "TimedOut", "{variant}");
    }
}

#[test]
fn every_exit_code_has_its_entry() {
    let constants = EXIT_CODES
        .lines()
        .filter_map(|line| line.strip_prefix("pub(crate) const "));
    let values = constants.map(|constant| constant.split_once(": u8 = ").unwrap().1);
    let own: BTreeSet<u8> = values
        .map(|value| value.trim_end_matches(';').parse().unwrap())
        .collect();
    assert!(own.len() >= 9, "{own:?}");
    for (page, title) in [(PAGE, "code"), (README, "exit code")] {
        let rows = rows(page, title);
        let cells: Vec<_> = rows.iter().flat_map(|row| row[0].split(", ")).collect();
        let codes: BTreeSet<u8> = cells.iter().filter_map(|cell| cell.parse().ok()).collect();
        assert_eq!(codes, own, "{title}");
        assert!(
            cells.contains(&"the command's") && cells.contains(&"128 + n"),
            "{title}"
        );
    }
    let help = World::new().run("run --help").stdout;
    let (_, shown) = help.split_once("Exit codes:").unwrap();
    let numbers = shown
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.parse::<u8>().ok());
    for code in numbers.filter(|code| *code != 128) {
        assert!(own.contains(&code), "{code}");
    }
}

/// The sources of a crate: without comments and unit tests, string literals in one line and without escapes.
fn sources(package: &str) -> Vec<String> {
    let mut sources = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders = vec![root.join(package).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let (code, _) = text.split_once("#[cfg(test)]\nmod tests").unwrap_or((&text, ""));
                let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
                let code = code.collect::<Vec<_>>().join("\n");
                let literals: String = code.split("\\\n").map(str::trim_start).collect();
                sources.push(literals.replace("\\\"", "\"").replace("{ENV}", ENV));
            }
        }
    }
    sources
}

#[test]
fn the_messages_are_those_of_the_code() {
    let packages = "fencelock fencelock-cli lock-core lock-etcd lock-postgres lock-redis lock-sqlite lock-transport";
    let sources: Vec<_> = packages.split(' ').flat_map(sources).collect();
    let rows = rows(PAGE, "message");
    let messages: Vec<_> = rows.iter().flat_map(|row| code_spans(row[0])).collect();
    assert!(messages.len() >= rows.len(), "a message is not a code span");
    for message in messages {
        let parts: Vec<_> = message.split("...").map(str::trim).collect();
        let is_long = parts.iter().all(|part| part.len() >= 10);
        assert!(is_long, "{message:?} is too short to be found by");
        let is_in = |source: &String| {
            let next = |at, part: &&str| Some(at + source[at..].find(part)? + part.len());
            parts.iter().try_fold(0, next).is_some()
        };
        assert!(sources.iter().any(is_in), "no code says {message:?}");
    }
}
