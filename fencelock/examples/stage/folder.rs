//! The temporary folder of a run.

use tempfile::TempDir;

use crate::Outcome;

/// Makes a folder that is removed when it is dropped.
pub(crate) fn folder(prefix: &str) -> Outcome<TempDir> {
    let folder = tempfile::Builder::new().prefix(prefix).tempdir();
    folder.map_err(|error| {
        let place = std::env::temp_dir();
        format!(
            "No folder can be made in {}: {error}. Set TMPDIR to a folder that you can write to.",
            place.display()
        )
        .into()
    })
}
