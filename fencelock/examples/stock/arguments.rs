//! What is to be sold, to how many, by how many.

use clap::Parser;

use crate::Outcome;

/// Real processes sell a limited stock, once for each way of taking turns, and the books are looked at afterwards.
#[derive(Clone, Debug, Parser)]
#[command(name = "stock", version)]
pub(crate) struct Arguments {
    /// Where the locks and the store are, such as redis://localhost; a SQLite file in a folder of its own by default
    #[arg(long)]
    pub(crate) url: Option<String>,

    /// How many articles there are
    #[arg(long, default_value_t = 100, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) stock: u32,

    /// How many want to buy one each; more than there are articles
    #[arg(long, default_value_t = 200, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(2..=20_000))]
    pub(crate) buyers: u32,

    /// How many processes sell
    #[arg(long, default_value_t = 4, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) processes: u32,
}

/// What a till needs, in bytes, with a good margin.
const TILL: u64 = 16 << 20;

impl Arguments {
    /// Whether it makes sense, and whether this machine can do it.
    pub(crate) fn check(&self) -> Outcome<()> {
        let Self {
            stock,
            buyers,
            processes,
            ..
        } = *self;
        if buyers <= stock {
            return Err(format!(
                "{buyers} buyers cannot be sold more than {stock} articles, whatever goes wrong; give more --buyers or less --stock"
            )
            .into());
        }
        if processes > buyers {
            return Err(format!(
                "{processes} processes for {buyers} buyers leave some with nobody to sell to; give fewer --processes"
            )
            .into());
        }
        match room() {
            Some(room) if room < u64::from(processes) => Err(format!(
                "{processes} processes are more than this machine can start: there is memory for about {room}; \
                 give fewer --processes"
            )
            .into()),
            _ => Ok(()),
        }
    }
}

/// For how many tills there is memory, where the system tells.
fn room() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kibibytes * 1024 / TILL)
}
