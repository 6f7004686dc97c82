//! Tests that hold on every backend are written once.

/// Makes a test of each function, on each backend.
macro_rules! on_every_backend {
    ($($test:ident),* $(,)?) => {
        mod on_sqlite {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::Sqlite);
                }
            )*
        }

        #[cfg(feature = "etcd")]
        mod on_etcd {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::Etcd);
                }
            )*
        }

        #[cfg(feature = "postgres")]
        mod on_postgres {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::Postgres);
                }
            )*
        }

        #[cfg(feature = "redis")]
        mod on_redis {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::Redis);
                }
            )*
        }
    };
}
