//! The SQL that a database needs.

use crate::world::World;

#[test]
fn the_schema_is_printed_and_the_rights_of_a_role_if_it_is_named() {
    let done = World::new().run(["schema", "postgres"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    assert!(
        done.stdout.starts_with("CREATE SCHEMA IF NOT EXISTS \"fencelock\";\n"),
        "{done:?}"
    );
    assert!(!done.stdout.contains("GRANT"), "{done:?}");
    let done = World::new().run(["schema", "postgres", "--role", "a\"b", "--schema", "shop"]);
    assert_eq!(done.code, Some(0));
    let grant = "GRANT USAGE ON SCHEMA \"shop\" TO \"a\"\"b\";";
    assert!(done.stdout.contains(grant), "{done:?}");
}

#[test]
fn a_schema_that_cannot_be_is_refused() {
    for (args, says) in [
        (&["schema"][..], "<DATABASE>"),
        (&["schema", "mysql"], "postgres"),
        (&["schema", "postgres", "--schema", ""], "1 to 63 bytes"),
    ] {
        let done = World::new().run(args);
        let line = done.one_line(64);
        assert!(line.contains(says), "{line}");
    }
}
