//! Whoever may make the schema first does not get code of theirs run by the roles that lock.

use lock_core::LockError;

use crate::server::Database;

/// What the owner of the schema may put in the way. `evil()` makes whoever runs it tell who it is.
const PLANTS: &[(&str, &str)] = &[
    (
        "trigger evil",
        "CREATE FUNCTION fencelock.fire() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM public.evil(); RETURN NEW; END';
         CREATE TRIGGER evil BEFORE UPDATE ON fencelock.counter FOR EACH ROW EXECUTE FUNCTION fencelock.fire()",
    ),
    (
        "rule evil",
        "CREATE RULE evil AS ON UPDATE TO fencelock.counter DO ALSO SELECT evil()",
    ),
    (
        "rule evil",
        "CREATE RULE evil AS ON INSERT TO fencelock.reservation DO ALSO SELECT evil()",
    ),
    (
        "policy evil",
        "ALTER TABLE fencelock.era ENABLE ROW LEVEL SECURITY; GRANT ALL ON fencelock.era TO planter;
         CREATE POLICY evil ON fencelock.era USING (evil() > 0)",
    ),
    (
        "default",
        "ALTER TABLE fencelock.era ADD COLUMN more bigint DEFAULT evil()",
    ),
    (
        "constraint evil",
        "ALTER TABLE fencelock.era ADD CONSTRAINT evil CHECK (evil() > 0)",
    ),
    (
        "index",
        "CREATE FUNCTION still(text) RETURNS bigint IMMUTABLE LANGUAGE sql AS 'SELECT evil()';
         CREATE INDEX evil ON fencelock.era (still(era))",
    ),
    (
        "relation counter",
        "ALTER TABLE fencelock.counter RENAME TO counted;
         CREATE VIEW fencelock.counter AS SELECT only_row, format, start, ceiling, era FROM fencelock.counted WHERE evil() > 0",
    ),
];

#[tokio::test]
async fn tables_that_would_run_code_of_their_owner_are_refused_before_they_are_used() {
    let server = Database::new().await;
    server
        .run_sql(&format!(
            "CREATE ROLE planter LOGIN; GRANT CREATE ON DATABASE {} TO planter; CREATE TABLE caught (who text);
             GRANT INSERT ON caught TO PUBLIC;
             CREATE FUNCTION evil() RETURNS bigint LANGUAGE sql AS 'INSERT INTO public.caught VALUES (current_user) RETURNING 1'",
            server.name()
        ))
        .await;
    let schema = lock_postgres::schema_sql("fencelock", None).unwrap();
    for (what, plant) in PLANTS {
        let sql = format!(
            "DROP SCHEMA IF EXISTS fencelock CASCADE; DROP FUNCTION IF EXISTS still(text) CASCADE; SET ROLE planter; {schema}; RESET ROLE; \
             GRANT CREATE ON SCHEMA public TO planter; SET ROLE planter; {plant}; RESET ROLE; TRUNCATE caught"
        );
        server.run_sql(&sql).await;
        let connected = server.config().connect().await;
        let caught: i64 = server.value("SELECT count(*) FROM caught WHERE who = 'postgres'").await;
        assert_eq!(caught, 0, "{what} ran");
        let error = connected.expect_err(what);
        assert!(
            matches!(error, LockError::UnsafeConfiguration { .. }),
            "{what}: {error:?}"
        );
        assert!(format!("{error:#}").contains(what), "{what}: {error}");
        let allowed = server.config().allow_unsafe_configuration(true).connect().await;
        assert!(
            !matches!(allowed, Err(LockError::UnsafeConfiguration { .. })),
            "{allowed:?}"
        );
    }
    // As it is made, whoever made it, and as it comes out of a dump: that is what the other tests use.
    server
        .run_sql(&format!("DROP SCHEMA fencelock CASCADE; SET ROLE planter; {schema}"))
        .await;
    server.client().await;
}
