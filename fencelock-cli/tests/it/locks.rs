//! `holder`, `list`, `release` and `check`; help, completions and manual pages.

use std::fs;

use serde_json::Value;

use crate::world::{Done, SHORT_TTL, World, binary};

#[test]
fn holders_are_shown_to_people_and_to_programs() {
    let world = World::new();
    world.script("job", "exec sleep 600");
    let mut program = world.fencelock();
    program.args(["run", "--label", "a \u{1b}[2J label", "lock", "--", "sh", "job"]);
    let running = world.started(&mut program, "exec sleep 600");
    let (pid, place) = (running.fencelock().0, world.url());
    let done = world.run("holder lock");
    let Done { code, stdout, .. } = &done;
    assert!(*code == Some(0) && stdout.starts_with("lock, held by "), "{done:?}");
    // Nothing that a terminal would obey.
    assert!(
        stdout.contains(&format!(":{pid} (a \u{fffd}[2J label) for ")),
        "{done:?}"
    );
    assert!(
        stdout.contains(", token ") && stdout.ends_with(" unless renewed\n"),
        "{done:?}"
    );
    let holder = world.holder();
    let shown = [&holder["name"], &holder["pid"], &holder["mode"], &holder["max_holders"]];
    assert_eq!(shown, [&"lock".into(), &pid.into(), &"exclusive".into(), &Value::Null]);
    assert!(holder["token"].as_u64().unwrap() > 0 && holder["remaining_ms"].as_u64().unwrap() <= 30_000);

    let done = world.run("list");
    assert_eq!(done.stderr, format!("fencelock: 1 lock is held in {place}\n"));
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("NAME  MODE "), "{lines:?}");
    assert!(
        lines[1].starts_with("lock  exclusive  ") && lines[1].contains("\u{fffd}[2J label"),
        "{lines:?}"
    );
    let list = world.run("list lo --json").json();
    assert_eq!(list["location"], place);
    assert_eq!(list["locks"][0]["name"], "lock");
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
    // The user's own file is made with the first lock.
    for (line, code) in [("list", 0), ("holder lock", 1)] {
        let mut command = world.fencelock();
        command.env_remove("FENCELOCK_URL").env("HOME", world.dir());
        assert_eq!(Done::of(command.args(line.split(' '))).code, Some(code));
    }
    assert_eq!(fs::read_dir(world.dir()).unwrap().count(), 0);

    world.run("run lock -- true").is(0, "", "");
    let url = format!("{}?mode=ro", world.url());
    for line in ["run lock -- true", "release --force lock"] {
        world.run_at(&url, line).fails(78, "read-only");
    }
    assert_eq!(world.run_at(&url, "list").code, Some(0));
    assert_eq!(world.run_at(&url, "holder lock").code, Some(1));
}

#[test]
fn a_lock_is_taken_away_only_by_force() {
    let world = World::new();
    let running = world.sleeper(SHORT_TTL);
    world.run("release lock").fails(64, "--force");
    assert!(!world.is_free());
    let done = world.run("release --force lock --json");
    assert_eq!(
        (done.code, &done.json()["pid"]),
        (Some(0), &running.fencelock().0.into())
    );
    world.run("release --force lock").is(1, "lock is free\n", "");
    assert_eq!(running.end().code, Some(76));
}

#[test]
fn a_check_tries_everything_leaves_nothing_and_says_what_is_refused() {
    let world = World::new();
    let done = world.run("check");
    assert!(done.code == Some(0) && done.stderr.is_empty(), "{done:?}");
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
        assert!(done.stdout.contains(&format!("  {step:17} ok ")), "{step}: {done:?}");
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

    fs::create_dir(world.path("folder")).unwrap();
    let done = world.run_at(&world.file("folder"), "check");
    let says = done.stdout.contains("refused") && done.stdout.contains("is a directory");
    assert!(says && done.code == Some(78), "{done:?}");
    let done = world.run_at(&world.file("folder"), "check --json");
    assert_eq!((done.code, &done.json()["ok"]), (Some(78), &false.into()));
}

#[test]
fn every_command_has_help_with_an_example_and_a_manual_page() {
    let world = World::new();
    for command in [
        "run",
        "holder",
        "list",
        "release",
        "check",
        "completions",
        "man",
        "schema",
    ] {
        for help in ["-h", "--help"] {
            let done = world.run(&format!("{command} {help}"));
            assert!(done.code == Some(0) && done.stderr.is_empty(), "{done:?}");
            assert!(done.stdout.contains(&format!("\n  fencelock {command}")), "{done:?}");
        }
        let page = world.run(&format!("man {command}"));
        assert!(page.stdout.contains(&format!(".TH fencelock-{command} 1")), "{page:?}");
    }
    assert!(world.run("--help").stdout.contains("FENCELOCK_URL"));
    assert!(world.run("man").stdout.contains(".TH fencelock 1"));
    world
        .run("--version")
        .is(0, concat!("fencelock ", env!("CARGO_PKG_VERSION"), "\n"), "");
}

#[test]
fn completions_are_printed_and_shells_know_held_names_and_the_command_after_the_dashes() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = world.run(&format!("completions {shell}"));
        assert!(done.code == Some(0) && done.stdout.contains("holder"), "{shell}");
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
        bash.args(["--norc", "-c", script, binary(), "fencelock"])
            .args(line.split(' '));
        let done = Done::of(&mut bash);
        assert_eq!(done.stderr, "", "{line}");
        done.stdout
    };
    for command in ["run", "holder", "list", "release"] {
        assert_eq!(complete(&format!("{command} lo")), "lock\n", "{command}");
        assert_eq!(complete(&format!("{command} x")), "\n", "{command}");
        let options = complete(&format!("{command} --u"));
        assert!(options.lines().any(|option| option == "--url"), "{command}");
    }
    for option in ["--ttl", "--timeout", "--max-hold", "--min-hold"] {
        assert_eq!(complete(&format!("run {option} 5s lo")), "lock\n", "{option}");
    }
    assert_eq!(complete("--url sqlite : elsewhere.db holder "), "\n");
    for (line, word) in [
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
    let grants = done.stdout.contains("GRANT USAGE ON SCHEMA \"shop\" TO \"a\"\"b\";");
    assert!(grants, "{done:?}");
    world
        .run_words(["schema", "postgres", "--schema", ""])
        .fails(64, "1 to 63 bytes");
}
