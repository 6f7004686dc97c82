//! What takes long, needs a server of a test's own, or needs what not every user may do.

mod containers;
mod etcd;
mod privileged;
mod redis;
mod slow;
