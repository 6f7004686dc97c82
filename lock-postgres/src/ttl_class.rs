//! Which ttls share a session.

use std::time::Duration;

/// In seconds; below ten also a tenth and a hundredth of them. Each is at most one and a half times the one before, and
/// those that people choose are among them.
const CLASSES: [f64; 37] = [
    1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0,
    300.0, 420.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0, 10_800.0, 14_400.0, 21_600.0, 28_800.0,
    43_200.0, 64_800.0, 86_400.0,
];

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The ttl of the session that carries locks of that ttl: the next one of a few, never less, and at most one and a half
/// times as much.
pub(crate) fn class_of(ttl: Duration) -> Duration {
    let millis = |seconds: f64| Duration::from_millis((seconds * 1000.0).round() as u64);
    let small = [0.01, 0.1]
        .into_iter()
        .flat_map(|unit| CLASSES.iter().take(10).map(move |class| class * unit));
    let mut classes = small.chain(CLASSES).map(millis);
    let found = classes.find(|class| *class >= ttl);
    // Whole days beyond the longest.
    found.unwrap_or_else(|| DAY * u32::try_from(ttl.as_nanos().div_ceil(DAY.as_nanos())).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_no_less_than_the_ttl_and_not_much_more() {
        let mut last = Duration::ZERO;
        for millis in (100..90_000_000).step_by(997) {
            let ttl = Duration::from_millis(millis);
            let class = class_of(ttl);
            assert!(class >= ttl && class >= last, "{ttl:?}: {class:?}");
            assert!(class <= ttl * 3 / 2 || ttl > DAY, "{ttl:?}: {class:?}");
            assert_eq!(class_of(class), class);
            last = class;
        }
    }

    #[test]
    fn common_ttls_are_classes_of_their_own() {
        for millis in [
            100, 150, 200, 300, 500, 700, 1000, 2000, 5000, 10_000, 30_000, 60_000, 3_600_000,
        ] {
            let ttl = Duration::from_millis(millis);
            assert_eq!(class_of(ttl), ttl);
        }
        assert_eq!(class_of(3 * DAY - Duration::from_secs(1)), 3 * DAY);
    }
}
