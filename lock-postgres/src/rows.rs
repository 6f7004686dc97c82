//! What a message was answered with.

use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow};

use crate::failure::Failure;

/// The rows of all statements of one message, in order.
#[derive(Debug)]
pub(crate) struct Rows(Vec<Row>);

/// One row; every value is text.
#[derive(Debug)]
pub(crate) struct Row(SimpleQueryRow);

impl Rows {
    pub(crate) fn new(messages: Vec<SimpleQueryMessage>) -> Self {
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => Some(Row(row)),
            _ => None,
        };
        Self(messages.into_iter().filter_map(row).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Row> {
        self.0.iter()
    }

    pub(crate) fn last(&self) -> Option<&Row> {
        self.0.last()
    }

    /// The one row that the question has for an answer.
    pub(crate) fn one(&self) -> Result<&Row, Failure> {
        self.last().ok_or(Failure::Nonsense)
    }
}

impl Row {
    /// The value, or `None` for null.
    pub(crate) fn get(&self, column: usize) -> Result<Option<&str>, Failure> {
        self.0.try_get(column).map_err(|_| Failure::Nonsense)
    }

    pub(crate) fn text(&self, column: usize) -> Result<&str, Failure> {
        self.get(column)?.ok_or(Failure::Nonsense)
    }

    pub(crate) fn number<T: std::str::FromStr>(&self, column: usize) -> Result<T, Failure> {
        self.text(column)?.parse().map_err(|_| Failure::Nonsense)
    }

    pub(crate) fn truth(&self, column: usize) -> Result<bool, Failure> {
        match self.text(column)? {
            "t" => Ok(true),
            "f" => Ok(false),
            _ => Err(Failure::Nonsense),
        }
    }
}
