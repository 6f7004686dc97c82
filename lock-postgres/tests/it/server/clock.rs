//! A clock that is not this machine's, by libfaketime.

use std::process::Command;
use std::sync::OnceLock;

/// What a program has to load for its clock to be set by the environment.
pub(super) fn library() -> &'static str {
    static LIBRARY: OnceLock<String> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // It knows where its own is; the program under it would not get our signals.
        let asked = Command::new("faketime")
            .args(["-f", "-1h", "printenv", "LD_PRELOAD"])
            .env_remove("LD_PRELOAD")
            .output()
            .expect("there is no faketime; install it: apt-get install faketime");
        assert!(asked.status.success(), "{asked:?}");
        String::from_utf8(asked.stdout).unwrap().trim_end().to_owned()
    })
}
