//! What can be asked of `fencelock torture`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum, ValueHint};
use conformance_tests::torture::{Config, Fault, Missing};

use crate::arguments::time;

/// Let processes share a few locks while faults come and go, and judge what happened.
///
/// Each client is a process of its own. Clients ask, wait, give up, hold, write to a register that refuses stale tokens,
/// and let go; meanwhile they are stopped, killed, cut off from the server and slowed down, and their wall clocks step.
/// Then everything is healed, and the whole history is judged: tokens rise, no two believe in one lock at once, no stale
/// write is taken, what is lost stays lost, and every name can be locked again.
///
/// Do not point it at a server that others need: it keeps the server busy. Its names begin with `torture/`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Torture {
    /// How many processes there are.
    #[arg(long, value_name = "N", default_value = "8", value_parser = RangedU64ValueParser::<usize>::new().range(1..=500))]
    pub(crate) clients: usize,
    /// How many locks they share.
    #[arg(long, value_name = "N", default_value = "4", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1000))]
    pub(crate) names: usize,
    /// For how long: 60s, 10m.
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = time, allow_hyphen_values = true)]
    pub(crate) time: Duration,
    /// How long a lock outlives its holder; faults last up to twice as long.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time, allow_hyphen_values = true)]
    pub(crate) ttl: Duration,
    /// What happens to the clients, separated by commas [default: pause,kill,partition,latency,clock, without clock where
    /// libfaketime is missing].
    #[arg(long, value_name = "FAULTS", value_delimiter = ',')]
    faults: Option<Vec<Named>>,
    /// Where the faults and the choices of the clients come from; a random one if not given, and shown in the end.
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Write a page with a picture of what happened; if the name ends in .svg, a drawing of a few clients over some seconds.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) report: Option<PathBuf>,
    /// Write the history, as JSON.
    #[arg(long, value_name = "FILE.json", value_hint = ValueHint::FilePath)]
    pub(crate) history: Option<PathBuf>,
    /// Print JSON: an object with "ok", "violations" and the figures.
    #[arg(long)]
    pub(crate) json: bool,
    /// Run nothing, but judge that history.
    #[arg(
        long,
        value_name = "FILE.json",
        value_hint = ValueHint::FilePath,
        conflicts_with_all = ["clients", "names", "time", "ttl", "faults", "seed", "history"],
    )]
    pub(crate) check: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  fencelock torture --url redis://127.0.0.1:6379 --report torture.html
  fencelock torture --url sqlite:/tmp/locks.db --for 10m --faults pause,kill
  fencelock torture --check history.json

Exit codes:
  0    no violation
  64   wrong arguments, or a file that is no history
  69   the locks cannot be reached
  70   violations
  74   a file cannot be written
  78   a wrong configuration, such as a password or the rights to a file
  128 + signal if a signal ended the run early";

/// A fault as people ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Named {
    /// Clients are stopped, for up to two ttl.
    Pause,
    /// Clients are killed, and others take their place.
    Kill,
    /// Clients are cut off: what is sent or answered waits, is lost, or connections are refused.
    Partition,
    /// Answers and requests take longer, up to half a ttl each way.
    Latency,
    /// The wall clocks of clients step, by up to an hour, and back. Needs libfaketime: the package faketime.
    Clock,
    /// The server is stopped for a while.
    ServerPause,
    /// The server is killed and started again.
    ServerKill,
}

/// What happens if nothing is asked for.
const USUAL: [Named; 5] = [
    Named::Pause,
    Named::Kill,
    Named::Partition,
    Named::Latency,
    Named::Clock,
];

impl Named {
    /// The fault, or why nobody but the one who has started the server can inject it.
    fn fault(self) -> Result<Fault, &'static str> {
        match self {
            Self::Pause => Ok(Fault::Pause),
            Self::Kill => Ok(Fault::Kill),
            Self::Partition => Ok(Fault::Partition),
            Self::Latency => Ok(Fault::Latency),
            Self::Clock => Ok(Fault::Clock),
            Self::ServerPause | Self::ServerKill => Err("the server is one that somebody else runs"),
        }
    }

    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Faults that cannot be injected, each with the reason.
type Unfit = Vec<(String, String)>;

impl Torture {
    /// The faults that can be injected, and those that cannot, with the reason. `no_route` says why there is no way to
    /// stand in.
    ///
    /// # Errors
    ///
    /// [`Missing`], if a fault was asked for by its name and could be injected if something were installed.
    pub(crate) fn faults(&self, no_route: Option<&'static str>) -> Result<(Vec<Fault>, Unfit), Missing> {
        let (mut fit, mut unfit) = (Vec::new(), Vec::new());
        for named in self.wanted() {
            let fault = named.fault().and_then(|fault| match no_route {
                Some(why) if fault.needs_route() => Err(why),
                _ => Ok(fault),
            });
            match fault {
                Ok(fault) if fit.contains(&fault) => {}
                Ok(fault) => match fault.can_happen_here() {
                    Ok(()) => fit.push(fault),
                    Err(missing) if self.faults.is_some() => return Err(missing),
                    Err(missing) => unfit.push((named.name(), missing.to_string())),
                },
                Err(why) => unfit.push((named.name(), why.to_owned())),
            }
        }
        Ok((fit, unfit))
    }

    fn wanted(&self) -> &[Named] {
        self.faults.as_deref().unwrap_or(&USUAL)
    }

    pub(crate) fn config(&self, faults: Vec<Fault>) -> Config {
        let mut config = Config::new();
        (config.clients, config.names) = (self.clients, self.names);
        (config.time, config.ttl) = (self.time, self.ttl);
        config.faults = faults;
        config.seed = self.seed.unwrap_or(config.seed);
        config
    }

    /// The faults that are wanted.
    pub(crate) fn names(&self) -> String {
        let names: Vec<_> = self.wanted().iter().map(|named| named.name()).collect();
        names.join(", ")
    }
}
