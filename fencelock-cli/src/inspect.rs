//! Looking at locks, and taking them away.

use std::process::ExitCode;
use std::time::SystemTime;

use fencelock::Holder;
use serde_json::{Value, json};

use crate::arguments::{HolderOf, List, Release};
use crate::exit::{FREE, Failure};
use crate::place::Place;
use crate::say::{print, remark};
use crate::waiting::{held_by, spelt, visible};

/// Says who holds a lock.
pub(crate) async fn holder(place: &Place, of: &HolderOf) -> Result<ExitCode, Failure> {
    let holders = match place.inspector()? {
        Some(locks) => locks.holders(&of.name).await?,
        None => Vec::new(),
    };
    tell(&of.name, &holders, of.json, |holder| {
        let token = holder.token.map(|token| format!(", token {token}")).unwrap_or_default();
        let left = holder
            .remaining
            .filter(|_| !holder.is_reserved)
            .map(|left| format!(", freed in {} unless renewed", spelt(left)))
            .unwrap_or_default();
        format!("{}{}{token}{left}", of.name, held_by(holder))
    })
}

/// Takes a lock away from whoever holds it.
pub(crate) async fn release(place: &Place, release: &Release) -> Result<ExitCode, Failure> {
    if !release.force {
        return Err(Failure::usage(
            "releasing a lock takes it away from its holder, who may be at work; say so with --force",
        ));
    }
    let victims = place.client()?.force_release(&release.name).await?;
    tell(&release.name, &victims, release.json, |victim| {
        let others = match victim.also_released {
            None | Some(0) => String::new(),
            Some(1) => "; its holder did not answer, so 1 other lock of it was released too".to_owned(),
            Some(n) => format!("; its holder did not answer, so {n} other locks of it were released too"),
        };
        format!(
            "{} was{} and is free now{others}",
            release.name,
            held_by(victim).trim_start_matches(',')
        )
    })
}

/// Prints who holds or held a lock, a line for each, or that nobody does.
fn tell(name: &str, holders: &[Holder], json: bool, sentence: impl Fn(&Holder) -> String) -> Result<ExitCode, Failure> {
    if holders.is_empty() {
        let free = if json {
            Value::Null.to_string()
        } else {
            format!("{name} is free")
        };
        print(&(free + "\n"))?;
        return Ok(ExitCode::from(FREE));
    }
    let line = |holder| {
        if json {
            in_json(holder).to_string()
        } else {
            sentence(holder)
        }
    };
    print(&holders.iter().map(|holder| line(holder) + "\n").collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// Lists what is held.
pub(crate) async fn list(place: &Place, list: &List) -> Result<ExitCode, Failure> {
    let held = match place.inspector()? {
        Some(locks) => locks.list(&list.prefix).await?,
        None => Vec::new(),
    };
    if list.json {
        let locks: Vec<Value> = held.iter().map(in_json).collect();
        print(&format!(
            "{}\n",
            json!({ "location": place.to_string(), "locks": locks })
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    if list.names {
        let names = held.iter().filter_map(|holder| holder.name.as_ref());
        return print(&names.map(|name| format!("{name}\n")).collect::<String>()).map(|()| ExitCode::SUCCESS);
    }
    let what = match (held.len(), list.prefix.as_str()) {
        (0, "") => "no locks are held".to_owned(),
        (0, prefix) => format!("no locks are held under {}", visible(prefix)),
        (1, _) => "1 lock is held".to_owned(),
        (n, _) => format!("{n} locks are held"),
    };
    remark(format_args!("{what} in {place}"));
    if !held.is_empty() {
        print(&table(&held))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(held: &[Holder]) -> String {
    let head = ["NAME", "HOLDER", "LABEL", "TOKEN", "HELD FOR", "FREED IN"].map(str::to_owned);
    let now = SystemTime::now();
    let rows = held.iter().map(|holder| {
        let name = holder
            .name
            .as_ref()
            .map(ToString::to_string)
            .or_else(|| holder.key.clone());
        let label = holder.label.as_deref().unwrap_or_default();
        let process = visible(&without_label(holder.clone()));
        let process = match holder.is_reserved {
            true => format!("reserved ({process})"),
            false => process,
        };
        [
            name.unwrap_or_default(),
            process,
            visible(label),
            holder.token.map(|token| token.to_string()).unwrap_or_default(),
            holder
                .acquired_at
                .and_then(|at| now.duration_since(at).ok())
                .map(spelt)
                .unwrap_or_default(),
            holder.remaining.map(spelt).unwrap_or_default(),
        ]
    });
    let rows: Vec<[String; 6]> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn without_label(mut holder: Holder) -> String {
    holder.label = None;
    holder.to_string()
}

/// Times in milliseconds, points in time as RFC 3339 writes them; null for what is not known.
fn in_json(holder: &Holder) -> Value {
    json!({
        "name": holder.name.as_ref().map(|name| name.as_str()),
        "key": holder.key,
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
