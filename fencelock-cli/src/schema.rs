//! What a database needs before locks can be kept in it.

use std::process::ExitCode;

use fencelock::postgres::schema_sql;

use crate::arguments::{Database, Schema};
use crate::exit::Failure;
use crate::say::print;

/// Prints the SQL.
pub(crate) fn print_it(of: &Schema) -> Result<ExitCode, Failure> {
    let sql = match of.database {
        Database::Postgres => schema_sql(&of.schema, of.role.as_deref()),
    };
    print(&sql.map_err(|error| Failure::usage(format!("{error:#}")))?)?;
    Ok(ExitCode::SUCCESS)
}
