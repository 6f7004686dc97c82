//! What the pages of the repository state, compared with the code and with each other.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fencelock::Locks;

/// A published page is read there: links to it are links into the repository.
const ON_THE_WEB: &str = "https://github.com/fencelock/fencelock/blob/main/";

/// An address for each backend and topology.
const ADDRESSES: [&str; 8] = [
    "memory:",
    "sqlite:/nowhere/locks.db",
    "redis://h",
    "redis+sentinel://h/service",
    "redis+cluster://h",
    "redlock://a,b,c",
    "postgres://h/database",
    "etcd://h",
];

/// Words that a reader of README.md need not meet.
const NOT_IN_README: [&str; 16] = [
    "believe",
    "believes",
    "comes to the same",
    "is gone",
    "let go",
    "lets go",
    "nobody",
    "patience",
    "somebody",
    "someone",
    "told",
    "weather",
    "whoever",
    "wish",
    "wishes",
    "who asks",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn page(path: &str) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files of the repository whose names end so.
fn files(ending: &str) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && name != "target" && (!name.starts_with('.') || name == ".github") {
                folders.push(path);
            } else if name.ends_with(ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The lines of a page that are no code, without the code spans in them.
fn prose(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            lines.push(line.split('`').step_by(2).collect());
        }
    }
    lines
}

/// What the links and pictures of a page lead to.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text).join("\n");
    let ends = [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"'), ("href=\"", '"')];
    let all = ends.iter().flat_map(|(start, end)| {
        let found = prose.split(start).skip(1);
        found.map(|rest| rest.split(*end).next().unwrap_or_default().to_owned())
    });
    all.collect()
}

/// The anchors of a page, as GitHub makes them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen = HashMap::new();
    let mut in_code = false;
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        let Some((marks, heading)) = line.split_once(' ') else {
            continue;
        };
        if in_code || marks.is_empty() || marks.chars().any(|c| c != '#') {
            continue;
        }
        let mut parts = heading.split("](");
        let text = parts.next().unwrap_or_default().to_owned();
        let text = parts.fold(text, |text, part| {
            text + part.split_once(')').map_or(part, |(_, rest)| rest)
        });
        let kept = text.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let before = seen.entry(anchor.clone()).or_insert(0);
        anchors.insert(match *before {
            0 => anchor,
            n => format!("{anchor}-{n}"),
        });
        *before += 1;
    }
    anchors
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_that_are_there() {
    let mut links = Vec::new();
    for file in files(".md") {
        let text = fs::read_to_string(&file).unwrap();
        links.extend(targets(&text).into_iter().map(|target| (file.clone(), target)));
    }
    for file in files(".rs") {
        let text = fs::read_to_string(&file).unwrap();
        for rest in text.split(ON_THE_WEB).skip(1) {
            let target = rest.split([')', '"', '>', ' ', '\n', '`']).next().unwrap_or_default();
            links.push((file.clone(), format!("{ON_THE_WEB}{target}")));
        }
    }
    assert!(links.len() > 200, "only {} links were found", links.len());
    let mut dead = Vec::new();
    for (file, target) in &links {
        let (from, path) = match target.strip_prefix(ON_THE_WEB) {
            Some(path) => (root(), path),
            None if target.contains("://") || target.starts_with("mailto:") => continue,
            None => (file.parent().unwrap().to_owned(), target.as_str()),
        };
        let (path, anchor) = path.split_once('#').unwrap_or((path, ""));
        let to = if path.is_empty() { file.clone() } else { from.join(path) };
        let there = match anchor {
            "" => to.exists(),
            anchor => fs::read_to_string(&to).is_ok_and(|text| anchors(&text).contains(anchor)),
        };
        if !there {
            dead.push(format!("{}: {target}", file.display()));
        }
    }
    assert!(dead.is_empty(), "links that lead nowhere:\n{}", dead.join("\n"));
}

/// The names in a list such as "namespace, op_timeout (such as 5s), ca (with rediss:), and cert and key (with etcds:)".
fn names(list: &str) -> BTreeSet<String> {
    let without_remarks = list
        .split('(')
        .map(|part| part.split_once(')').map_or(part, |(_, rest)| rest));
    let words = without_remarks.collect::<String>().replace(',', " ");
    let words = words.split_whitespace().filter(|word| *word != "and");
    words.map(str::to_owned).collect()
}

/// The parameters that the backends accept, by what they say if there is an unknown one; and those of libpq.
fn accepted() -> (BTreeSet<String>, BTreeSet<String>) {
    let mut ours = BTreeSet::new();
    let mut libpq = BTreeSet::new();
    for address in ADDRESSES.iter().filter(|address| !address.starts_with("memory")) {
        let error = fencelock::connect_lazy(format!("{address}?unheard-of=1")).unwrap_err();
        let error = error.to_string();
        let (_, known) = error
            .split_once("known are ")
            .unwrap_or_else(|| panic!("{address}: {error}"));
        let (own, of_libpq) = known.split_once(", and of libpq ").unwrap_or((known, ""));
        ours.extend(names(own).iter().map(|name| of_any_node(name).to_owned()));
        libpq.extend(names(of_libpq));
    }
    (ours, libpq)
}

/// The name of a parameter. Those of one node of Redlock have the names that they have elsewhere.
fn of_any_node(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, name)| name)
}

#[test]
fn the_parameters_of_addresses_in_the_documentation_are_those_that_backends_accept() {
    let facade = page("fencelock/src/lib.rs");
    let mut documented = BTreeSet::new();
    for line in facade.lines() {
        let Some(row) = line.strip_prefix("//! | `") else {
            continue;
        };
        let cell = row.split(" | ").next().unwrap_or_default();
        // Of addresses by a socket: they stand with it.
        let socket = row.strip_prefix("SOCKET` | ");
        let spans = socket.or(cell.starts_with('?').then_some(cell)).unwrap_or_default();
        let skipped = usize::from(socket.is_some());
        for span in spans
            .split('`')
            .skip(skipped)
            .step_by(2)
            .flat_map(|span| span.split('&'))
        {
            let name = span.trim_start_matches('?').split('=').next().unwrap_or_default();
            let name = of_any_node(name);
            documented.extend((!name.is_empty()).then(|| name.to_owned()));
        }
    }
    let (ours, libpq) = accepted();
    let missing: Vec<_> = ours.difference(&documented).collect();
    assert!(missing.is_empty(), "fencelock/src/lib.rs does not document {missing:?}");
    let known = &ours | &libpq;
    let unknown: Vec<_> = documented.difference(&known).collect();
    assert!(
        unknown.is_empty(),
        "no backend knows {unknown:?} of fencelock/src/lib.rs"
    );

    let of_postgres = page("lock-postgres/src/config.rs");
    let missing: Vec<_> = libpq
        .iter()
        .filter(|name| !of_postgres.contains(&format!("`{name}`")))
        .collect();
    assert!(
        missing.is_empty(),
        "lock-postgres/src/config.rs does not document {missing:?}"
    );
}

#[test]
fn the_schemes_of_addresses_are_documented() {
    let facade = page("fencelock/src/lib.rs");
    for scheme in [
        "etcd:",
        "etcds:",
        "memory:",
        "postgres:",
        "postgresql:",
        "redis:",
        "rediss:",
        "redis+unix:",
        "redis+sentinel:",
        "redis+cluster:",
        "redlock:",
        "redlocks:",
        "sqlite:",
        "valkey:",
        "valkeys:",
    ] {
        let refused =
            fencelock::connect_lazy(format!("{scheme}//")).is_err_and(|e| e.to_string().contains("no backend"));
        assert!(!refused, "{scheme} is no scheme");
        let word = format!("`{}`", scheme.trim_end_matches(':'));
        let documented = facade.contains(&format!("`{scheme}")) || facade.contains(&word);
        assert!(documented, "{scheme} is not documented");
    }
}

#[test]
fn the_table_of_what_an_address_changes_is_what_the_backends_say() {
    let page = page("docs/choosing-a-backend.md");
    for address in ADDRESSES {
        let (scheme, _) = address.split_once(':').unwrap();
        let row = page.lines().find(|line| line.starts_with(&format!("| `{scheme}:` |")));
        let cells: Vec<_> = row
            .unwrap_or_else(|| panic!("no row for {scheme}:"))
            .split(" | ")
            .collect();
        let Ok(locks) = fencelock::connect_lazy(address) else {
            panic!("{address} was refused")
        };
        let has = Locks::capabilities(&locks);
        let (min, max) = cells[1].split_once(" to ").unwrap();
        assert_eq!((time(min), time(max)), (has.min_ttl, has.max_ttl), "{address}");
        assert_eq!(cells[3].starts_with("in order"), has.fair, "{address}");
    }
}

/// A time such as "100 ms", with a remark behind it perhaps.
fn time(text: &str) -> Duration {
    let (number, unit) = text.split_once(' ').unwrap();
    let millis = match unit.split(' ').next().unwrap() {
        "ms" => 1,
        "s" => 1000,
        "min" => 60_000,
        "day" | "days" => 24 * 3_600_000,
        other => panic!("{other} is no unit"),
    };
    Duration::from_millis(number.parse::<u64>().unwrap() * millis)
}

#[test]
fn pages_name_the_oldest_rust_of_the_manifest() {
    let manifest = page("Cargo.toml");
    let (_, rest) = manifest.split_once("rust-version = \"").unwrap();
    let (version, _) = rest.split_once('"').unwrap();
    let mut named = 0;
    for file in files(".md") {
        // Older releases needed what they needed.
        if file.ends_with("CHANGELOG.md") {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        for start in ["Rust 1.", "at present 1.", "rust-1.", "rustc 1."] {
            for rest in text.split(start).skip(1) {
                let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
                assert_eq!(format!("1.{minor}"), version, "{}", file.display());
                named += 1;
            }
        }
    }
    assert!(named > 0, "no page names it");
}

#[test]
fn the_readme_is_short_and_plain() {
    let readme = page("README.md");
    let lines = readme.lines().count();
    assert!(lines <= 150, "README.md has {lines} lines, at most 150 are wanted");
    let footnotes: Vec<_> = readme
        .matches(|c| "¹²³⁴⁵⁶⁷⁸⁹⁰".contains(c))
        .chain(readme.matches("[^"))
        .collect();
    assert!(footnotes.is_empty(), "README.md has footnotes: {footnotes:?}");
    let words: Vec<_> = readme
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .collect();
    let words = format!(" {} ", words.join(" ").to_lowercase());
    let found: Vec<_> = NOT_IN_README
        .iter()
        .filter(|word| words.contains(&format!(" {word} ")))
        .collect();
    assert!(found.is_empty(), "README.md has the words {found:?}");
}
