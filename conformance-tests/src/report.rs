//! Where a run writes what it showed, for programs.

use std::path::PathBuf;
use std::{fs, io};

use serde_json::Value;

/// Names the folder of the reports, if they are not to lie in cargo's target folder.
const FOLDER: &str = "FENCELOCK_CONFORMANCE_REPORTS";

/// Writes the report of that backend, in place of an earlier one. Where there is no folder for it, nothing is written.
pub(crate) fn write(backend: &str, report: &Value) -> io::Result<()> {
    let Some(folder) = folder() else { return Ok(()) };
    fs::create_dir_all(&folder)?;
    let name: String = backend
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .collect();
    // In one step, for whoever reads meanwhile.
    let new = folder.join(format!(".{name}.{}", std::process::id()));
    fs::write(&new, format!("{report:#}\n"))?;
    fs::rename(new, folder.join(name + ".json"))
}

fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()) {
        return Some(folder.into());
    }
    // Tests run from target/debug/deps or the like.
    let program = std::env::current_exe().ok()?;
    let kind = program.parent()?;
    let is_cargos = kind.ends_with("deps") || kind.ends_with("examples");
    let target = kind.parent()?.parent()?;
    is_cargos.then(|| target.join("conformance"))
}
