//! `holder`, `list`, `release` and `check`; help, completions and manual pages.

use std::fs;

use serde_json::Value;

use crate::world::{Done, SHORT_TTL, World, binary};

#[test]
fn holders_are_shown_to_people_and_to_programs() {
    let world = World::new();
    world.job("exec sleep 600");
    let mut program = world.fencelock();
    program.args(["run", "--label", "a \u{1b}[2J label", "lock", "--", "sh", "job"]);
    let running = world.started(&mut program, "exec sleep 600");
    let (pid, place) = (running.fencelock().0, world.url());
    let done = world.run("holder lock");
    // Nothing that a terminal would obey.
    let label = format!(":{pid} (a \u{fffd}[2J label) for ");
    done.shows(0, &["lock, held by ", &label, ", token ", " unless renewed\n"]);
    let holder = world.holder();
    let shown = ["name", "pid", "mode", "max_holders"].map(|field| &holder[field]);
    assert_eq!(shown, [&"lock".into(), &pid.into(), &"exclusive".into(), &Value::Null]);
    assert!(holder["token"].as_u64().unwrap() > 0 && holder["remaining_ms"].as_u64().unwrap() <= 30_000);

    let done = world.run("list");
    assert_eq!(done.stderr, format!("fencelock: 1 lock is held in {place}\n"));
    done.shows(0, &["NAME  MODE ", "\nlock  exclusive  ", "\u{fffd}[2J label"]);
    assert_eq!(done.stdout.lines().count(), 2);
    let list = world.run("list lo --json").json();
    assert_eq!([&list["location"], &list["locks"][0]["name"]], [&*place, "lock"]);
    assert_eq!(world.run("list other/ --json").json()["locks"], Value::Array(vec![]));
    let none = format!("fencelock: no locks are held under other/ in {place}\n");
    world.run("list other/").is(0, "", &none);
    world.run("list --names").is(0, "lock\n", "");
    running.fencelock().signal(rustix::process::Signal::TERM);
    running.end();
    world.run("holder lock --json").is(1, "null\n", "");
}

#[test]
fn looking_makes_no_file_and_an_address_that_is_read_only_takes_no_locks() {
    let world = World::new();
    for path in ["no/such/dir/x.db", "x.db"] {
        for line in ["list", "holder lock"] {
            let done = world.run_at(&world.file(path), line);
            done.fails(78, path);
            done.fails(78, "check the path");
        }
    }
    assert_eq!(fs::read_dir(world.dir()).unwrap().count(), 0);

    world.run("run lock -- true").is(0, "", "");
    let url = format!("{}?mode=ro", world.url());
    for line in ["run lock -- true", "release --force lock"] {
        world.run_at(&url, line).fails(78, "read-only");
    }
    world.run_at(&url, "list").ends_with(0);
    world.run_at(&url, "holder lock").ends_with(1);
}

#[test]
fn a_lock_is_taken_away_only_by_force() {
    let world = World::new();
    let running = world.sleeper(SHORT_TTL);
    world.run("release lock").fails(64, "--force");
    assert!(!world.is_free());
    let done = world.run("release --force lock --json");
    done.ends_with(0);
    assert_eq!(done.json()["pid"], running.fencelock().0);
    world.run("release --force lock").is(1, "lock is free\n", "");
    running.end().ends_with(76);
}

#[test]
fn a_check_tries_everything_leaves_nothing_and_says_what_is_refused() {
    let world = World::new();
    let done = world.run("check");
    assert_eq!(done.stderr, "");
    let steps = [
        "connect",
        "acquire",
        "renew",
        "ask for holder",
        "list",
        "refuse others",
        "release",
        "wait",
        "hand over",
        "release by force",
        "look at settings",
    ];
    for step in steps {
        done.shows(0, &[&format!("  {step:17} ok ")]);
    }
    let report = world.run("check --json").json();
    assert_eq!(report["ok"], true);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["steps"].as_array().unwrap().len(), steps.len());
    assert!(
        report["shared"].is_boolean() && report["warnings"].is_array(),
        "{report}"
    );
    assert_eq!(world.run("list").stdout, "");

    let folder = world.file("folder");
    fs::create_dir(world.path("folder")).unwrap();
    world.run_at(&folder, "check").shows(78, &["refused", "is a directory"]);
    let done = world.run_at(&folder, "check --json");
    done.ends_with(78);
    assert_eq!(done.json()["ok"], false);
}

#[test]
fn every_command_has_help_with_an_example_and_a_manual_page() {
    let world = World::new();
    let commands = "run holder list release check completions man schema";
    for command in commands.split(' ') {
        for help in ["-h", "--help"] {
            let done = world.run(&format!("{command} {help}"));
            done.shows(0, &[&format!("\n  fencelock {command}")]);
            assert_eq!(done.stderr, "");
        }
        let title = format!(".TH fencelock-{command} 1");
        world.run(&format!("man {command}")).shows(0, &[&title]);
    }
    world.run("--help").shows(0, &["FENCELOCK_URL"]);
    world.run("man").shows(0, &[".TH fencelock 1"]);
    let version = concat!("fencelock ", env!("CARGO_PKG_VERSION"), "\n");
    world.run("--version").is(0, version, "");
}

#[test]
fn completions_are_printed_and_shells_know_held_names_and_the_command_after_the_dashes() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        world.run(&format!("completions {shell}")).shows(0, &["holder"]);
    }
    let zsh = world.run("completions zsh").stdout;
    assert_eq!(zsh.matches(":_fencelock_held' \\\n").count(), 4);
    assert!(zsh.starts_with("#compdef fencelock\n") && zsh.matches("_fencelock_held() {").count() == 1);
    let running = world.sleeper("");
    world.write("a-file", "");
    // As bash calls the function: words are parted at colons too.
    let complete = |line: &str| {
        let script = r#"source <("$0" completions bash)
            COMP_WORDS=("$0" "${@:2}"); COMP_CWORD=$(($# - 1))
            $(complete -p fencelock | sed 's/.*-F \([^ ]*\).*/\1/') "$0" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut bash = world.program("bash");
        bash.args(["--norc", "-c", script, binary(), "fencelock"]);
        let done = Done::of(bash.args(line.split(' ')));
        assert_eq!(done.stderr, "", "{line}");
        done.stdout
    };
    for (line, only) in [
        ("run lo", "lock\n"),
        ("holder lo", "lock\n"),
        ("list lo", "lock\n"),
        ("release lo", "lock\n"),
        ("holder x", "\n"),
        ("run --ttl 5s lo", "lock\n"),
        ("run --timeout 5s lo", "lock\n"),
        ("run --max-hold 5s lo", "lock\n"),
        ("run --min-hold 5s lo", "lock\n"),
        ("--url sqlite : elsewhere.db holder ", "\n"),
    ] {
        assert_eq!(complete(line), only, "{line}");
    }
    for (line, word) in [
        ("run --u", "--url"),
        ("release --u", "--url"),
        ("run lock -- sle", "sleep"),
        ("run lock -- cat -n a-f", "a-file"),
        ("run -- -name -- sle", "sleep"),
        ("hol", "holder"),
    ] {
        let found = complete(line);
        assert!(found.lines().any(|found| found == word), "{line}: {found:?}");
    }
    running.stop();
}

#[test]
fn the_schema_is_printed_with_the_rights_of_a_role_if_it_is_named() {
    let world = World::new();
    let done = world.run("schema postgres");
    let makes = done.stdout.starts_with("CREATE SCHEMA IF NOT EXISTS \"fencelock\";\n");
    assert!(makes && !done.stdout.contains("GRANT"), "{done:?}");
    let done = world.run("schema postgres --role a\"b --schema shop");
    done.shows(0, &["GRANT USAGE ON SCHEMA \"shop\" TO \"a\"\"b\";"]);
    let done = world.run_words(["schema", "postgres", "--schema", ""]);
    done.fails(64, "1 to 63 bytes");
}
