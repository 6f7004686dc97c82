//! Command line arguments.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;

use crate::exit::BUSY;

/// Run commands under distributed locks, and look after those locks.
///
/// Locks are kept by a server or in a file, at an address: --url, or FENCELOCK_URL in the environment. Without either
/// they are kept in fencelock/locks.db in your state directory (XDG_STATE_HOME, or ~/.local/state), and exclude your
/// own processes on this machine.
#[derive(Debug, Parser)]
#[command(name = "fencelock", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  fencelock run backup -- /usr/local/bin/backup --full
  fencelock list
  FENCELOCK_URL=sqlite:/srv/shop/locks.db fencelock check";

/// What every command understands.
#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Where the locks are kept, such as sqlite:/srv/shop/locks.db; FENCELOCK_URL if not given.
    ///
    /// Others can read it in the list of processes. An address with a password in it is better kept in FENCELOCK_URL.
    #[arg(long, value_name = "URL", global = true, value_hint = ValueHint::Url)]
    pub(crate) url: Option<String>,
    /// Say on stderr what happens; twice, in detail.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Say nothing on stderr but errors. A lock that is busy is none: the exit code tells it.
    #[arg(short, long, global = true, conflicts_with = "verbose", overrides_with = "quiet")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Holder(HolderOf),
    List(List),
    Release(Release),
    Check(Check),
    #[cfg(feature = "postgres")]
    Schema(Schema),
    /// Print completions for a shell.
    #[command(
        after_help = "Example:\n  fencelock completions bash > ~/.local/share/bash-completion/completions/fencelock"
    )]
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Print a manual page.
    #[command(after_help = "Examples:\n  fencelock man | man -l -\n  fencelock man run > fencelock-run.1")]
    Man {
        /// The command to describe; all of fencelock if not given.
        #[arg(value_name = "COMMAND")]
        command: Option<String>,
    },
}

/// Run a command while holding a lock.
///
/// Waits for the lock, runs the command, and releases the lock. The command gets stdin, stdout and stderr as they are. It finds the lock's
/// name in FENCELOCK_NAME and the fencing token in FENCELOCK_TOKEN: send the token with every write to what the lock protects, so that a
/// write that comes too late can be refused. Signals are passed on to the command.
///
/// If the lock is about to end, the command and what it has started get SIGTERM, and SIGKILL after --grace, before another can be granted the
/// lock: also if fencelock is killed or stopped. What leaves the command's process group, such as a daemon, is not ended.
#[derive(Args, Debug)]
#[command(override_usage = "fencelock run [OPTIONS] NAME -- COMMAND [ARG]...\n       fencelock run [OPTIONS] NAME -c LINE", after_help = RUN_EXAMPLES)]
pub(crate) struct Run {
    /// Give up when the lock has been busy for that long: 5 (seconds), 500ms, 10m. Without it, wait as long as it takes.
    #[arg(short, long, visible_alias = "timeout", value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,
    /// Give up at once when the lock is busy.
    #[arg(short, long, visible_aliases = ["nonblock", "nb"], conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// The exit code if the lock stays busy.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = BUSY)]
    pub(crate) conflict_exit_code: u8,
    /// Share the lock with others that ask for it with --shared: for commands that only read.
    #[arg(short, long, conflicts_with_all = ["max_holders", "min_hold"])]
    pub(crate) shared: bool,
    /// Let up to N commands hold the lock at once. All have to give the same N. There is no FENCELOCK_TOKEN then.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "min_hold")]
    pub(crate) max_holders: Option<u32>,
    /// End the command when it has held the lock for that long.
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the lock taken for at least that long, also if the command ends before, or fencelock is killed.
    ///
    /// For a command that a scheduler starts on several machines: with --no-wait it runs on the first of them, and the lock is busy for the
    /// others. Give less than the time between two starts, and more than the clocks of the machines differ. `fencelock release --force` frees
    /// the lock.
    #[arg(long, visible_alias = "at-least", value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) min_hold: Option<Duration>,
    /// How long the lock stays taken if this machine crashes. It is renewed while the command runs.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time, allow_hyphen_values = true)]
    pub(crate) ttl: Duration,
    /// The time between SIGTERM and SIGKILL when the lock is about to end. 5s, or what fits into a third of the ttl.
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) grace: Option<Duration>,
    /// A text for people who ask who holds the lock.
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// COMMAND is a line for /bin/sh; further arguments are its $1, $2 and so on.
    #[arg(short = 'c', long)]
    pub(crate) shell: bool,
    /// The lock: up to 512 bytes of UTF-8, without control characters.
    pub(crate) name: String,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

const RUN_EXAMPLES: &str = "\
Examples:
  fencelock run backup -- /usr/local/bin/backup --full
  fencelock run --wait 10s --label nightly report -- make report
  fencelock run -n -E 0 cleanup -- find /tmp -mtime +7 -delete
  fencelock run -n --min-hold 55m hourly -- /usr/local/bin/report   (from cron, on every host)
  fencelock run counter -c 'n=$(cat n); echo $((n + 1)) > n'
  fencelock run --shared book -- grep -c x book.txt
  fencelock run --max-holders 4 download -- curl -O https://example.org/big

Exit codes:
  the command's own, or 128 + the signal that ended it
  64   wrong arguments
  69   the locks cannot be reached, or the system refuses a process or thread; worth a retry
  75   the lock stayed busy (-E changes it)
  76   the lock was lost while the command ran, and the command was ended
  78   a wrong configuration, such as a password or the rights to a file, or locks that cannot do this; not worth a retry
  126  the command cannot be executed
  127  the command was not found
  128 + signal if a signal ended the wait for the lock";

/// A number alone means seconds, as for flock and timeout.
fn time(text: &str) -> Result<Duration, &'static str> {
    let positive = text.strip_prefix('-').unwrap_or(text);
    let seconds = positive
        .parse()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number).ok());
    match seconds.or_else(|| humantime::parse_duration(positive).ok()) {
        Some(time) if positive == text => Ok(time),
        Some(_) => Err("a time cannot be negative; give one such as 5 (seconds), 500ms, 30s or 5m"),
        None => Err("give a time such as 5 (seconds), 500ms, 30s or 5m"),
    }
}

/// Say who holds a lock. Exit code 1 if it is free.
///
/// It only looks: the right to read a file of locks is enough, and nothing is written to it. Exit code 78 if there is no such file.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  fencelock holder backup\n  fencelock holder backup --json")]
pub(crate) struct HolderOf {
    /// The lock.
    pub(crate) name: String,
    /// Print JSON: an object, or null if it is free.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the locks that are held.
///
/// It only looks: the right to read a file of locks is enough, and nothing is written to it. Exit code 78 if there is no such file.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  fencelock list\n  fencelock list shop/ --json\n  fencelock list --names")]
pub(crate) struct List {
    /// Only those whose names start with it.
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
    /// Print JSON: an object with "location" and "locks".
    #[arg(long)]
    pub(crate) json: bool,
    /// Print nothing but the names, one on each line.
    #[arg(long, conflicts_with = "json")]
    pub(crate) names: bool,
}

/// Take a lock away from its holder. Exit code 1 if it is free.
///
/// The holder learns of it at its next renewal, at the latest a third of its ttl later. Until then both it and the next
/// holder believe in the lock; only the fencing token tells them apart.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  fencelock release --force backup")]
pub(crate) struct Release {
    /// Yes, although its holder may be at work.
    #[arg(long)]
    pub(crate) force: bool,
    /// The lock.
    pub(crate) name: String,
    /// Print JSON: who held it, or null.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Check that locks can be kept there, with all rights that it takes.
///
/// Tries everything that fencelock may need on locks of its own, with two clients: one takes, renews and releases a lock, the
/// other is refused, waits, and is granted it. Exit code 78 if anything is refused that a person has to change first, and 69 if
/// something else fails. What puts locks at risk is printed as warnings, which do not change the exit code: settings of the server, and
/// a file that others may only read, or that lies in a container's own layer.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  fencelock check\n  fencelock check --url sqlite:/srv/shop/locks.db --json")]
pub(crate) struct Check {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the SQL that a database needs before locks can be kept in it.
///
/// Only where the role that locks may not make what is missing by itself; a role that may runs this once.
#[cfg(feature = "postgres")]
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  fencelock schema postgres --role locks | psql -U postgres shop")]
pub(crate) struct Schema {
    /// The kind of database.
    pub(crate) database: Database,
    /// Print also the least rights that this role needs.
    #[arg(long, value_name = "ROLE")]
    pub(crate) role: Option<String>,
    /// The schema, as the address of the locks has it.
    #[arg(long, value_name = "NAME", default_value = "fencelock")]
    pub(crate) schema: String,
}

#[cfg(feature = "postgres")]
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Database {
    /// PostgreSQL 15 or later. In version 14 sequences cannot be unlogged: leave the word out there.
    Postgres,
}
