//! How it looks: calm on a terminal, plain elsewhere.

use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::io::{self, IsTerminal, Write};

pub(crate) struct Screen {
    coloured: bool,
}

impl Screen {
    pub(crate) fn new() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        let able = std::env::var_os("TERM").is_none_or(|v| v != "dumb");
        Self {
            coloured: wanted && able && io::stdout().is_terminal(),
        }
    }

    pub(crate) fn title(&self, text: &str) -> Result<(), Unseen> {
        show(&format!("\n{}", self.bold(text)))
    }

    pub(crate) fn scene(&self, name: &str, text: &str) -> Result<(), Unseen> {
        show(&format!("\n{}", self.bold(name)))?;
        for line in text.lines() {
            show(&format!("  {}", self.dim(line)))?;
        }
        Ok(())
    }

    /// What happened, the number that matters, and what it means.
    pub(crate) fn row(&self, what: &str, number: &str, meaning: &str) -> Result<(), Unseen> {
        let line = format!("    {what:<26}{number:>22}   {meaning}");
        show(line.trim_end())
    }

    pub(crate) fn end(&self, text: &str) -> Result<(), Unseen> {
        show(&format!("\n{}\n", self.paint("32", text)))
    }

    /// Why it ended before its end. A reader who has gone was told enough.
    pub(crate) fn failure(&self, error: Box<dyn Error + Send + Sync>) {
        let unseen = match error.downcast::<Unseen>() {
            Ok(unseen) => Some(*unseen),
            Err(error) => show(&format!("\n{}\n", self.paint("31", &error.to_string()))).err(),
        };
        if let Some(unseen) = unseen.filter(|unseen| !unseen.is_by_choice()) {
            complain(&unseen.to_string());
        }
    }

    fn bold(&self, text: &str) -> String {
        self.paint("1", text)
    }

    fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    fn paint(&self, code: &str, text: &str) -> String {
        match self.coloured {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

/// Nothing can be shown: whoever read it has gone, or there is no room for it.
#[derive(Debug)]
pub(crate) struct Unseen(io::Error);

impl Unseen {
    /// The reader has seen enough, as `head` has.
    fn is_by_choice(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

impl Display for Unseen {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "the output cannot be written: {}", self.0)
    }
}

impl Error for Unseen {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

/// On the standard error output, if there is one.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn show(text: &str) -> Result<(), Unseen> {
    writeln!(io::stdout(), "{text}").map_err(Unseen)
}
