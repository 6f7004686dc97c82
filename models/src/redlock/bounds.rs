//! How far the search goes, and what is planted.

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A majority of the nodes that granted is enough, instead of a majority of all nodes.
    MajorityOfQ1,
    /// CONFIRM compares nothing.
    UnconditionalWriteBack,
    /// The highest token is taken without CONFIRM.
    MaxAlone,
    /// The coordinator keeps the first grant of a node that it asks again, and CONFIRM compares the owner alone.
    RetryWithoutStoredValue,
    /// RELEASE of an attempt that was given up does not compare the attempt.
    ReleaseWithoutAttempt,
    /// CONFIRM is sent to nodes that have not granted, and their answers count.
    NodesOutsideQ1,
    /// A node without data grants at once.
    NoRestartDelay,
    /// The clock of a node without data is above the tokens that were given, but not above those that were drawn.
    ClockBehindDrawnTokens,
    /// A renewal counts although less than a majority has answered.
    RenewedByMinority,
}

/// How far the search goes.
#[derive(Clone, Debug)]
pub struct Bounds<const N: usize> {
    /// The counters that the nodes may begin with.
    pub counters: Vec<[u8; N]>,
    /// The tokens that a client may propose.
    pub proposals: Vec<u8>,
    /// How often ACQUIRE arrives once more at a node, for each acquisition.
    pub repeats: u8,
    /// How many nodes lose their data.
    pub amnesias: u8,
    /// Whether ACQUIRE may arrive after its acquisition has ended.
    pub late_acquires: bool,
    /// Whether CONFIRM may arrive after its acquisition has ended.
    pub late_confirms: bool,
    /// Whether a node's lease may end while the acquisition goes on asking.
    pub lapses: bool,
    /// Whether a node without data waits before it grants. Without it, exclusion is not claimed.
    pub restart_delay: bool,
    /// How many of the acquisitions may give their first attempt up and make a second one.
    pub retries: usize,
    /// Whether holders renew.
    pub renewals: bool,
}
