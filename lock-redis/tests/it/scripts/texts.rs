//! The texts of the scripts, as they are or with a planted bug.

const FILES: &[(&str, &str)] = &[
    ("prelude.lua", include_str!("../../../src/scripts/prelude.lua")),
    ("shares.lua", include_str!("../../../src/scripts/shares.lua")),
    ("queue.lua", include_str!("../../../src/scripts/queue.lua")),
    ("acquire.lua", include_str!("../../../src/scripts/acquire.lua")),
    ("renew.lua", include_str!("../../../src/scripts/renew.lua")),
    ("renew_share.lua", include_str!("../../../src/scripts/renew_share.lua")),
    ("release.lua", include_str!("../../../src/scripts/release.lua")),
    (NODE, include_str!("../../../src/scripts/redlock.lua")),
];

/// The script of a node of several servers.
pub(crate) const NODE: &str = "redlock.lua";

/// A bug: in which file which lines are replaced by which.
#[derive(Default)]
pub(crate) struct Bug {
    pub(crate) file: &'static str,
    pub(crate) what: &'static str,
    from: Vec<&'static str>,
    to: Vec<&'static str>,
}

/// The bugs in `bugs.diff`. Each begins with its file and a name; lines with `-` are replaced by those with `+`, and others show where.
pub(crate) fn bugs() -> Vec<Bug> {
    let mut bugs: Vec<Bug> = Vec::new();
    for line in include_str!("bugs.diff").lines() {
        let (mark, rest) = line.split_at(2);
        match (mark, bugs.last_mut()) {
            ("- ", Some(bug)) => bug.from.push(rest),
            ("+ ", Some(bug)) => bug.to.push(rest),
            ("  ", Some(bug)) => {
                bug.from.push(rest);
                bug.to.push(rest);
            }
            _ => {
                let (file, what) = line.split_once(": ").unwrap();
                let (from, to) = Default::default();
                bugs.push(Bug { file, what, from, to });
            }
        }
    }
    bugs
}

/// The whole text of a script, with what it includes.
pub(crate) fn script(name: &str, bug: Option<&Bug>) -> String {
    let [prelude, shares, queue, body] = ["prelude.lua", "shares.lua", "queue.lua", name].map(|name| file(name, bug));
    let body = body.replace("-- include shares.lua\n", &shares);
    prelude + &body.replace("-- include queue.lua\n", &queue)
}

fn file(name: &str, bug: Option<&Bug>) -> String {
    let (_, text) = FILES.iter().find(|(known, _)| *known == name).unwrap();
    let Some(bug) = bug.filter(|bug| bug.file == name) else {
        return (*text).to_owned();
    };
    let mut lines: Vec<_> = text.lines().collect();
    let length = bug.from.len();
    let is_it = |some: &[&str]| some.iter().map(|line| line.trim()).eq(bug.from.iter().copied());
    let mut found = (0..=lines.len() - length).filter(|at| is_it(&lines[*at..at + length]));
    let (at, others) = (found.next(), found.count());
    let at = at.unwrap_or_else(|| panic!("{name} has no such lines: {}", bug.what));
    assert_eq!(others, 0, "the lines are not the only ones: {}", bug.what);
    lines.splice(at..at + length, bug.to.iter().copied());
    lines.join("\n") + "\n"
}
