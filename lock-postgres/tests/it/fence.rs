//! The mark of a resource is the same for everybody who writes to it.

use lock_core::FencingToken;
use lock_postgres::fence::{self, FenceError, FenceTable};
use lock_postgres::tokio_postgres::{Client, NoTls};

use crate::server::Database;

async fn client_of(server: &Database, role: &str) -> Client {
    let mut login = server.login();
    let (client, connection) = login.user(role).connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn admit(client: &mut Client, token: u64) -> Result<(), FenceError> {
    let tx = client.transaction().await.unwrap();
    fence::admit(&tx, "stock", FencingToken::new(token).unwrap()).await?;
    tx.commit().await.unwrap();
    Ok(())
}

#[tokio::test]
async fn roles_with_other_search_paths_have_one_mark() {
    let server = Database::new().await;
    let mut clients = Vec::new();
    let roles = ["fence_one", "fence_two"];
    for role in roles {
        let sql = format!(
            "CREATE ROLE {role} LOGIN; CREATE SCHEMA {role} AUTHORIZATION {role};
             ALTER ROLE {role} SET search_path = {role}; GRANT ALL ON SCHEMA public TO {role}"
        );
        server.run_sql(&sql).await;
        clients.push(client_of(&server, role).await);
    }
    clients[0].batch_execute(fence::CREATE_SQL).await.unwrap();
    clients[1].batch_execute(fence::CREATE_SQL).await.unwrap();
    server
        .run_sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO fence_one, fence_two")
        .await;
    admit(&mut clients[0], 8).await.unwrap();
    let stale = admit(&mut clients[1], 7).await;
    assert!(matches!(stale, Err(FenceError::Stale(_))), "{stale:?}");
    admit(&mut clients[1], 9).await.unwrap();
    let stale = admit(&mut clients[0], 8).await;
    assert!(matches!(stale, Err(FenceError::Stale(_))), "{stale:?}");
}

#[tokio::test]
async fn a_temporary_table_of_that_name_is_not_mistaken_for_the_marks() {
    let server = Database::new().await;
    let (mut one, mut two) = (server.plain().await, server.plain().await);
    one.batch_execute(fence::CREATE_SQL).await.unwrap();
    two.batch_execute("CREATE TEMPORARY TABLE fencelock_fence (resource text PRIMARY KEY, mark bigint NOT NULL)")
        .await
        .unwrap();
    admit(&mut one, 8).await.unwrap();
    let stale = admit(&mut two, 7).await;
    assert!(matches!(stale, Err(FenceError::Stale(_))), "{stale:?}");
}

#[tokio::test]
async fn marks_can_be_in_a_schema_of_choice() {
    let server = Database::new().await;
    server.run_sql(r#"CREATE SCHEMA "my {schema}""#).await;
    let marks = FenceTable::in_schema("my {schema}").unwrap();
    let mut client = server.plain().await;
    client.batch_execute(marks.create_sql()).await.unwrap();
    let tx = client.transaction().await.unwrap();
    let [seven, eight] = [7, 8].map(|token| FencingToken::new(token).unwrap());
    assert_eq!(marks.mark(&tx, "stock").await.unwrap(), None);
    marks.admit(&tx, "stock", eight).await.unwrap();
    let stale = marks.admit(&tx, "stock", seven).await;
    assert!(matches!(stale, Err(FenceError::Stale(_))), "{stale:?}");
    assert_eq!(marks.mark(&tx, "stock").await.unwrap(), Some(eight));
    tx.commit().await.unwrap();
    let mark: i64 = server.value(r#"SELECT mark FROM "my {schema}".fencelock_fence"#).await;
    assert_eq!(mark, 8);
}
