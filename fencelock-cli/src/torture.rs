//! `fencelock torture`: are these locks what locks have to be?

mod arguments;
mod drawing;
mod page;
mod picture;
mod progress;
mod result;

use std::env::ArgsOs;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use conformance_tests::oracle::History;
use conformance_tests::torture::{self, Config, Route};
use fencelock::{ENV, Locks};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::runtime::Builder;

pub(crate) use arguments::Torture;

use crate::exit::{Failure, OUTPUT, VIOLATION, by_signal};
use crate::place::Place;
use crate::say::{print, remark, say};
use crate::signals::Signals;
use crate::timing::shown;
use progress::Line;
use result::Outcome;

/// What a client process is called.
pub(crate) const CLIENT: &str = "lock-client";

/// Runs clients and faults, and judges what happened.
pub(crate) async fn torture(place: &Place, wanted: &Torture) -> Result<ExitCode, Failure> {
    let failed = |e| Failure::unavailable(format!("signals cannot be received: {e}"));
    let mut signals = Signals::listen().map_err(failed)?;
    let locks = place.client()?;
    let route = match place {
        Place::Address(url) => Route::of(url),
        #[cfg(feature = "sqlite")]
        Place::File(_) => Route::of(""),
    };
    let missing = |missing: torture::Missing| Failure::usage(missing.to_string());
    let (faults, unfit) = wanted.faults(route.as_ref().err().copied()).map_err(missing)?;
    let config = wanted.config(faults);
    // A path that cannot be written is better known now than after the run.
    let files = Files::open(wanted)?;
    for (fault, why) in &unfit {
        remark(format_args!("{fault}: not applicable, because {why}"));
    }
    let program = |url: Option<&str>| program(place, url);
    let here = torture::Place {
        locks: &locks,
        route: route.as_ref().ok(),
        program: &program,
        server: None,
    };
    let mut line = Line::new(config.time);
    let mut heard = None;
    let stop = async { heard = Some(signals.next().await) };
    let history = torture::run(&config, &here, stop, |progress| line.show(progress)).await;
    line.clear();
    let mut history = history.map_err(refused)?;
    history.about = about(place, &locks, &config, wanted, &unfit).await;
    let outcome = Outcome::of(history);
    files.write(&outcome)?;
    show(&outcome, wanted.json)?;
    if let Some(signal) = heard {
        remark(format_args!("the run was ended early, by signal {signal}"));
    }
    Ok(match heard {
        _ if !outcome.is_good() => ExitCode::from(VIOLATION),
        Some(signal) => ExitCode::from(by_signal(signal)),
        None => ExitCode::SUCCESS,
    })
}

/// Judges a history from a file.
pub(crate) fn check(wanted: &Torture) -> Result<ExitCode, Failure> {
    let path = wanted.check.as_deref().unwrap_or(Path::new("-"));
    let unreadable =
        |why: &dyn std::fmt::Display| Failure::usage(format!("{} cannot be judged: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| unreadable(&e))?;
    let history = History::from_json(&text).map_err(|e| unreadable(&e))?;
    let files = Files::open(wanted)?;
    let outcome = Outcome::of(history);
    files.write(&outcome)?;
    show(&outcome, wanted.json)?;
    Ok(ExitCode::from(if outcome.is_good() { 0 } else { VIOLATION }))
}

fn show(outcome: &Outcome, json: bool) -> Result<(), Failure> {
    print(&if json {
        format!("{}\n", outcome.in_json())
    } else {
        outcome.to_string()
    })
}

/// What a client process does, given the number of the one that started it.
pub(crate) fn client(mut args: ArgsOs) -> ExitCode {
    let parent: Option<i32> = args.next().and_then(|pid| pid.to_str()?.parse().ok());
    // A client that is stopped would otherwise stay for ever if nobody continues it any more.
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    if tied.is_err() || getppid().map(|pid| pid.as_raw_nonzero().get()) != parent {
        return ExitCode::from(by_signal(Signal::KILL.as_raw()));
    }
    let work = || {
        let locks = Place::find(None)?.client()?;
        let failed = |e| Failure::unavailable(format!("no runtime could be started: {e}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        Ok(runtime.block_on(torture::client(&locks)))
    };
    work().unwrap_or_else(|failure: Failure| {
        say(&failure);
        ExitCode::from(failure.code)
    })
}

/// This program again, as a client. Its address may be secret, so it is no argument.
fn program(place: &Place, url: Option<&str>) -> Command {
    let mut command = Command::new("/proc/self/exe");
    // Out of reach of what is typed: this process ends them.
    command
        .arg0(CLIENT)
        .arg(std::process::id().to_string())
        .process_group(0);
    match (url, place) {
        (Some(url), _) => command.env(ENV, url),
        (None, Place::Address(url)) => command.env(ENV, url),
        #[cfg(feature = "sqlite")]
        (None, Place::File(_)) => command.env_remove(ENV),
    };
    command
}

fn refused(failure: torture::Failure) -> Failure {
    match failure {
        torture::Failure::Lock(error) => error.into(),
        other => Failure::unavailable(other.to_string()),
    }
}

async fn about(
    place: &Place,
    locks: &Locks,
    config: &Config,
    wanted: &Torture,
    unfit: &[(String, String)],
) -> Vec<(String, String)> {
    let backend = locks.server_info().await;
    let backend = backend.map_or_else(|_| "unknown".to_owned(), |backend| backend.to_string());
    let unfit: Vec<_> = unfit.iter().map(|(fault, why)| format!("{fault} ({why})")).collect();
    let mut about = vec![
        ("locks in", place.to_string()),
        ("backend", backend),
        ("fencelock", env!("CARGO_PKG_VERSION").to_owned()),
        ("clients", config.clients.to_string()),
        ("names", config.names.to_string()),
        ("ttl", shown(config.ttl)),
        ("for", shown(config.time)),
        ("faults", wanted.names()),
        ("seed", config.seed.to_string()),
    ];
    if !unfit.is_empty() {
        about.push(("not applicable", unfit.join("; ")));
    }
    about
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

/// What `--report` writes.
enum Report {
    Drawing,
    Page,
}

impl Report {
    fn of(path: &Option<std::path::PathBuf>) -> Self {
        match path.as_deref().and_then(Path::extension) {
            Some(extension) if extension == "svg" => Self::Drawing,
            _ => Self::Page,
        }
    }
}

/// Where the report and the history go.
struct Files {
    report: Option<(File, Report)>,
    history: Option<File>,
}

impl Files {
    fn open(wanted: &Torture) -> Result<Self, Failure> {
        let open = |path: &Option<std::path::PathBuf>| match path {
            None => Ok(None),
            Some(path) => File::create(path).map(Some).map_err(|e| unwritable(path, &e)),
        };
        Ok(Self {
            report: open(&wanted.report)?.map(|file| (file, Report::of(&wanted.report))),
            history: open(&wanted.history)?,
        })
    }

    fn write(self, outcome: &Outcome) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::new(OUTPUT, format!("the outcome cannot be written: {e}"));
        if let Some((mut file, report)) = self.report {
            let report = match report {
                Report::Drawing => drawing::drawing(&outcome.history.records),
                Report::Page => page::page(outcome),
            };
            file.write_all(report.as_bytes()).map_err(failed)?;
        }
        if let Some(file) = self.history {
            let mut file = BufWriter::new(file);
            outcome
                .history
                .write_json(&mut file)
                .and_then(|()| file.flush())
                .map_err(failed)?;
        }
        Ok(())
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(OUTPUT, format!("{} cannot be written: {error}", path.display()))
}
