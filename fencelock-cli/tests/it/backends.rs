//! Tests that hold on every backend are written once.

/// Makes the tests that hold on every backend, on that backend. They take no more than a few seconds.
macro_rules! tests_of_every_backend {
    ($backend:ident) => {
        tests_on! { $backend:
            at_least {
                a_name_stays_taken_after_its_command,
            }
            exit_codes {
                the_code_is_the_commands_own,
                the_code_is_128_and_the_signal_that_killed_the_command,
                busy_is_75_and_names_the_holder,
                the_code_for_busy_can_be_chosen,
                lost_is_76_and_the_command_is_ended,
                what_cannot_be_executed_is_126,
                what_does_not_exist_is_127,
                the_lock_is_free_after_every_end,
            }
            inspection {
                a_holder_is_shown_to_people_and_to_programs,
                a_list_shows_what_is_held_under_a_prefix_and_where,
                a_lock_is_taken_away_only_by_force,
                a_check_tries_everything_and_leaves_nothing,
                a_verbose_run_tells_where_the_locks_are_and_what_happens,
            }
            losing {
                a_killed_locker_takes_the_command_and_all_its_offspring_along,
                a_stopped_locker_loses_command_and_lock_and_exits_with_76_when_it_wakes,
                a_killed_supervisor_takes_everything_along_at_once,
                the_lock_of_a_killed_locker_is_free_long_before_its_ttl,
                a_lock_that_is_taken_away_ends_the_command_and_all_its_offspring,
            }
            signals {
                a_signal_ends_the_wait_and_leaves_nothing_behind,
            }
            surroundings {
                the_command_finds_name_and_token_and_keeps_arguments_and_environment,
                without_terminal_stdin_and_environment_it_behaves,
            }
            terminal {
                ctrl_c_ends_the_wait_for_a_lock,
            }
            turns {
                twenty_processes_count_to_twenty,
                a_waiter_goes_on_as_soon_as_the_lock_is_free,
            }
        }
    };
}

/// Makes a test of each function, which are grouped by the modules that they are in.
macro_rules! tests_on {
    ($backend:ident: $($module:ident { $($test:ident),* $(,)? })*) => {
        $(
            mod $module {
                $(
                    #[test]
                    fn $test() {
                        crate::$module::$test(crate::world::Backend::$backend);
                    }
                )*
            }
        )*
    };
}

/// Makes a test of each function of the module, on each backend.
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
