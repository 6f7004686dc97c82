//! Looking at locks, and taking them away.

use std::process::ExitCode;
use std::time::SystemTime;

use fencelock::{Holder, Mode};
use serde_json::{Value, json};

use crate::args::{HolderOf, List, Release};
use crate::exit::{FREE, Failure};
use crate::location::Location;
use crate::output::{print, remark};
use crate::timing::shown;

/// Says who holds a lock.
pub(crate) async fn holder(location: &Location, of: &HolderOf) -> Result<ExitCode, Failure> {
    let holders = match location.inspector()? {
        Some(locks) => locks.holders(&of.name).await?,
        None => Vec::new(),
    };
    tell(&of.name, &holders, of.json, |holder| {
        let token = holder.token.map(|token| format!(", token {token}")).unwrap_or_default();
        let left = holder.remaining.filter(|_| !holder.is_reserved);
        let left = left.map(|left| format!(", freed in {} unless renewed", shown(left)));
        format!("{}{}{token}{}", of.name, held_by(holder), left.unwrap_or_default())
    })
}

/// Takes a lock away from its holder.
pub(crate) async fn release(location: &Location, release: &Release) -> Result<ExitCode, Failure> {
    if !release.force {
        return Err(Failure::usage(
            "releasing a lock takes it away from its holder, who may be at work; say so with --force",
        ));
    }
    let victims = location.client()?.force_release(&release.name).await?;
    tell(&release.name, &victims, release.json, |victim| {
        let others = match victim.also_released {
            None | Some(0) => String::new(),
            Some(n) => format!("; its holder did not answer, so other locks of it were released too: {n}"),
        };
        let held = held_by(victim);
        format!(
            "{} was{} and is free now{others}",
            release.name,
            held.trim_start_matches(',')
        )
    })
}

/// Prints who holds or held a lock, a line for each, or that it is free.
fn tell(name: &str, holders: &[Holder], json: bool, sentence: impl Fn(&Holder) -> String) -> Result<ExitCode, Failure> {
    if holders.is_empty() {
        print(&match json {
            true => "null\n".to_owned(),
            false => format!("{name} is free\n"),
        })?;
        return Ok(ExitCode::from(FREE));
    }
    let line = |holder| match json {
        true => format!("{}\n", in_json(holder)),
        false => sentence(holder) + "\n",
    };
    print(&holders.iter().map(line).collect::<String>())
}

/// Lists what is held.
pub(crate) async fn list(location: &Location, list: &List) -> Result<ExitCode, Failure> {
    let held = match location.inspector()? {
        Some(locks) => locks.list(&list.prefix).await?,
        None => Vec::new(),
    };
    if list.json {
        let locks: Value = held.iter().map(in_json).collect();
        return print(&format!(
            "{}\n",
            json!({ "location": location.to_string(), "locks": locks })
        ));
    }
    if list.names {
        let names = held.iter().filter_map(|holder| holder.name.as_ref());
        let mut names: Vec<String> = names.map(|name| format!("{name}\n")).collect();
        names.dedup();
        return print(&names.concat());
    }
    match held.len() {
        0 if list.prefix.is_empty() => remark(format_args!("no locks are held in {location}")),
        0 => remark(format_args!(
            "no locks are held under {} in {location}",
            visible(&list.prefix)
        )),
        1 => remark(format_args!("1 lock is held in {location}")),
        n => remark(format_args!("{n} locks are held in {location}")),
    }
    match held.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => print(&table(&held)),
    }
}

fn table(held: &[Holder]) -> String {
    let head = ["NAME", "MODE", "HOLDER", "LABEL", "TOKEN", "HELD FOR", "FREED IN"].map(str::to_owned);
    let rows = held.iter().map(|holder| {
        let name = holder.name.as_ref().map(ToString::to_string);
        let mut process = holder.clone();
        let label = process.label.take().unwrap_or_default();
        let mode = match (holder.is_reserved, holder.mode) {
            (true, _) => "reserved".to_owned(),
            (false, Mode::Shared) => "shared".to_owned(),
            (false, Mode::Permit { of }) => format!("1 of {of}"),
            (false, _) => "exclusive".to_owned(),
        };
        [
            name.or_else(|| holder.key.clone()).unwrap_or_default(),
            mode,
            visible(&process.to_string()),
            visible(&label),
            holder.token.map(|token| token.to_string()).unwrap_or_default(),
            held_for(holder).unwrap_or_default(),
            holder.remaining.map(shown).unwrap_or_default(),
        ]
    });
    let rows: Vec<[String; 7]> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 7] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// `, held by host:pid (label) for 12s`, or `, reserved by host:pid (label) for 5m more`, as much of it as is known.
pub(crate) fn held_by(holder: &Holder) -> String {
    let by = visible(&holder.to_string());
    let (how, time) = match holder.mode {
        _ if holder.is_reserved => {
            let left = holder.remaining.map(|left| format!("{} more", shown(left)));
            ("reserved by".to_owned(), left)
        }
        Mode::Shared => ("shared by".to_owned(), held_for(holder)),
        Mode::Permit { of } => (format!("held by up to {of}, one of them"), held_for(holder)),
        _ => ("held by".to_owned(), held_for(holder)),
    };
    let time = time.map(|time| format!(" for {time}")).unwrap_or_default();
    format!(", {how} {by}{time}")
}

fn held_for(holder: &Holder) -> Option<String> {
    let time = SystemTime::now().duration_since(holder.acquired_at?).ok()?;
    Some(shown(time))
}

/// What others wrote, without what a terminal would obey.
fn visible(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Times in milliseconds, points in time as RFC 3339 writes them; null for what is not known.
fn in_json(holder: &Holder) -> Value {
    let (mode, holders) = match holder.mode {
        Mode::Shared => ("shared", None),
        Mode::Permit { of } => ("permit", Some(of)),
        _ => ("exclusive", None),
    };
    json!({
        "name": holder.name.as_ref().map(|name| name.as_str()),
        "key": holder.key,
        "mode": mode,
        "max_holders": holders,
        "host": holder.host,
        "pid": holder.pid,
        "label": holder.label,
        "token": holder.token.map(|token| token.get()),
        "also_released": holder.also_released,
        "owner": holder.owner.map(|owner| owner.to_string()),
        "acquired_at": holder.acquired_at.map(|at| humantime::format_rfc3339_millis(at).to_string()),
        "reserved": holder.is_reserved,
        "remaining_ms": holder.remaining.map(|left| left.as_millis() as u64),
    })
}
