//! Whatever happens between a client and its server, nothing hangs, nothing is left, and no holder believes for too long.
//!
//! What the other groups do to the calls of a client is done here to its bytes.

mod cut;
mod late;
mod silence;
mod wake;

use super::{Entry, cases};
use crate::faults::Direction;
use cut::Request;

pub(crate) const CASES: &[Entry] = cases![
    every_call_ends_in_time_on_a_connection_that_fell_silent => |case| silence::every_call_ends(&case, Direction::Both),
    every_call_ends_in_time_while_requests_are_lost => |case| silence::every_call_ends(&case, Direction::ToServer),
    every_call_ends_in_time_while_replies_are_lost => |case| silence::every_call_ends(&case, Direction::ToClient),
    silence::connecting_into_silence_ends_in_time,
    a_holder_behind_a_silent_connection_notices_before_the_server_frees =>
        |case| silence::notices(&case, Direction::Both),
    a_holder_whose_requests_are_lost_notices_before_the_server_frees =>
        |case| silence::notices(&case, Direction::ToServer),
    a_holder_whose_replies_are_lost_notices_before_the_server_frees =>
        |case| silence::notices(&case, Direction::ToClient),
    silence::a_server_that_is_gone_is_unavailable_and_is_found_again,
    silence::a_wait_goes_on_until_the_server_is_there,
    an_acquisition_cut_after_any_byte_leaves_nothing => |case| cut::cut_after_any_byte(&case, Request::Acquire),
    a_renewal_cut_after_any_byte_leaves_nothing => |case| cut::cut_after_any_byte(&case, Request::Renew),
    a_release_cut_after_any_byte_leaves_nothing => |case| cut::cut_after_any_byte(&case, Request::Release),
    cut::a_reply_swallowed_after_the_commit_is_made_good_by_asking_again,
    late::an_acquisition_delivered_after_its_clean_up_is_gone_after_a_ttl,
    late::a_renewal_delivered_after_its_clean_up_brings_nothing_back,
    late::a_release_delivered_after_its_clean_up_spares_the_successor,
    late_replies_shorten_what_is_believed => |case| late::believed_in_time(&case, Direction::ToClient),
    late_requests_shorten_what_is_believed => |case| late::believed_in_time(&case, Direction::ToServer),
    wake::a_wake_up_missed_with_its_connection_is_repaired,
    wake::a_wake_up_lost_in_silence_is_repaired,
    wake::a_wait_into_silence_is_over_in_time_and_holds_nobody_up,
];
