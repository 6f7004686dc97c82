//! Looking at locks.

use serde_json::Value;

use crate::world::{Backend, Done, SHORT_TTL, World};

fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

pub(crate) fn a_holder_is_shown_to_people_and_to_programs(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&["--label", "nightly"], "exec sleep 600");
    let pid = running.locker().0;

    let done = world.run(["holder", "lock"]);
    assert_eq!(done.code, Some(0));
    let (_, held) = done.stdout.split_once(&format!(":{pid} (nightly) for ")).unwrap();
    let (seconds, _) = held.split_once(" s, token ").unwrap();
    assert!(seconds.parse::<u64>().is_ok(), "{done:?}");
    assert!(done.stdout.ends_with(" unless renewed\n"), "{done:?}");

    let holder = json(&world.run(["holder", "lock", "--json"]));
    assert_eq!(
        (&holder["name"], &holder["pid"], &holder["label"]),
        (&"lock".into(), &pid.into(), &"nightly".into())
    );
    assert!(holder["token"].as_u64().unwrap() > 0);
    assert!(holder["remaining_ms"].as_u64().unwrap() <= 30_000);

    running.stop();
    let done = world.run(["holder", "lock", "--json"]);
    assert_eq!((done.code, json(&done)), (Some(1), Value::Null));
}

pub(crate) fn a_list_shows_what_is_held_under_a_prefix_and_where(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&["--label", "a \u{1b}[2J label"], "exec sleep 600");
    let place = world.place();

    let done = world.run(["list"]);
    assert_eq!(done.code, Some(0));
    assert_eq!(done.stderr, format!("fencelock: 1 lock is held in {place}\n"));
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(lines[0].starts_with("NAME"), "{done:?}");
    assert!(
        lines[1].starts_with("lock ") && lines[1].contains("[2J label"),
        "{done:?}"
    );
    // Nothing that a terminal would obey.
    assert!(!lines[1].contains('\u{1b}'), "{done:?}");
    assert_eq!(lines.len(), 2);

    let list = json(&world.run(["list", "lo", "--json"]));
    assert_eq!(list["location"], place);
    let other = json(&world.run(["list", "other/", "--json"]));
    assert_eq!(list["locks"][0]["name"], "lock");
    assert_eq!(other["locks"], Value::Array(vec![]));
    let done = world.run(["list", "other/"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""));
    assert_eq!(
        done.stderr,
        format!("fencelock: no locks are held under other/ in {place}\n")
    );

    let names = world.run(["list", "--names"]);
    assert_eq!((names.stdout.as_str(), names.stderr.as_str()), ("lock\n", ""));

    running.stop();
}

pub(crate) fn a_lock_is_taken_away_only_by_force(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    world.run(["release", "lock"]).one_line(64);
    assert_eq!(world.run(["holder", "lock"]).code, Some(0));
    let done = world.run(["release", "--force", "lock", "--json"]);
    assert_eq!(done.code, Some(0));
    assert_eq!(json(&done)["pid"], running.locker().0);
    let done = world.run(["release", "--force", "lock"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "lock is free\n"));
    assert_eq!(running.end().code, Some(76));
}

pub(crate) fn a_check_tries_everything_and_leaves_nothing(backend: Backend) {
    let world = World::on(backend);
    let done = world.run(["check"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    for step in [
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
    ] {
        assert!(done.stdout.contains(&format!("  {step:17} ok ")), "{step}: {done:?}");
    }
    let report = json(&world.run(["check", "--json"]));
    assert_eq!(
        (&report["ok"], &report["version"]),
        (&true.into(), &env!("CARGO_PKG_VERSION").into())
    );
    assert_eq!(report["steps"].as_array().unwrap().len(), 11);
    assert!(report["warnings"].is_array(), "{report}");
    let (product, version) = (&report["backend"]["product"], &report["backend"]["version"]);
    assert!(
        product.as_str().unwrap().eq_ignore_ascii_case(&backend.product()),
        "{product}"
    );
    assert!(version.as_str().unwrap().split('.').count() >= 2, "{version}");
    let named = format!(" ({} {})\n", product.as_str().unwrap(), version.as_str().unwrap());
    assert!(done.stdout.contains(&named), "{done:?}");
    assert_eq!(world.run(["list"]).stdout, "");
}

#[test]
fn a_check_says_what_is_refused() {
    let world = World::new();
    std::fs::create_dir(world.path("locks.db")).unwrap();
    let done = world.run(["check"]);
    assert_eq!(done.code, Some(78));
    assert!(
        done.stdout.contains("refused") && done.stdout.contains("is a directory"),
        "{done:?}"
    );
    assert_eq!(json(&world.run(["check", "--json"]))["ok"], false);
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in ["run", "holder", "list", "release", "check", "completions", "man"] {
        for help in ["-h", "--help"] {
            let done = World::new().run([command, help]);
            assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{command}");
            assert!(done.stdout.contains(&format!("\n  fencelock {command}")), "{done:?}");
        }
    }
    assert!(World::new().run(["--help"]).stdout.contains("FENCELOCK_URL"));
    let version = World::new().run(["--version"]);
    assert_eq!(version.stdout, concat!("fencelock ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn completions_and_manual_pages_are_printed() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = World::new().run(["completions", shell]);
        assert_eq!(done.code, Some(0));
        assert!(
            done.stdout.contains("fencelock") && done.stdout.contains("holder"),
            "{shell}"
        );
    }
    let done = World::new().run(["man"]);
    assert!(done.stdout.contains(".TH fencelock 1"), "{done:?}");
    let done = World::new().run(["man", "run"]);
    assert!(done.stdout.contains(".TH fencelock-run 1"), "{done:?}");
    assert!(done.stdout.contains("Exit codes"), "{done:?}");
}

#[test]
fn bash_completes_held_names_and_the_command_after_the_dashes() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let other = world.run(["run", "two words", "--", "true"]);
    assert_eq!(other.code, Some(0));
    std::fs::write(world.path("a-file"), "").unwrap();
    // As bash calls the function: words are parted at colons too.
    let complete = |line: &[&str]| {
        let script = r#"source <("$0" completions bash)
            COMP_WORDS=("$0" "${@:2}"); COMP_CWORD=$(($# - 1))
            $(complete -p fencelock | sed 's/.*-F \([^ ]*\).*/\1/') "$0" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut bash = std::process::Command::new("bash");
        bash.args(["--norc", "-c", script, crate::world::binary()]).args(line);
        bash.env("FENCELOCK_URL", world.url()).current_dir(world.dir());
        let done = Done::of(&mut bash);
        assert_eq!(done.stderr, "", "{line:?}");
        done.stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let has = |line: &[&str], word: &str| {
        let found = complete(line);
        assert!(found.iter().any(|found| found == word), "{line:?}: {found:?}");
    };
    for command in ["run", "holder", "list", "release"] {
        assert_eq!(complete(&["fencelock", command, ""]), ["lock"], "{command}");
        assert_eq!(complete(&["fencelock", command, "lo"]), ["lock"], "{command}");
        assert_eq!(complete(&["fencelock", command, "x"]), [""], "{command}");
        has(&["fencelock", command, "--u"], "--url");
    }
    assert_eq!(complete(&["fencelock", "run", "--ttl", "5s", "lo"]), ["lock"]);
    let elsewhere = complete(&["fencelock", "--url", "sqlite", ":", "elsewhere.db", "holder", ""]);
    assert_eq!(elsewhere, [""]);
    has(&["fencelock", "run", "lock", "--", "sle"], "sleep");
    has(&["fencelock", "run", "--ttl", "5s", "lock", "--", "sle"], "sleep");
    has(&["fencelock", "run", "lock", "--", "cat", "a-f"], "a-file");
    has(&["fencelock", "run", "lock", "--", "cat", "-n", "a-f"], "a-file");
    has(&["fencelock", "run", "--", "-name", "--", "sle"], "sleep");
    has(&["fencelock", "hol"], "holder");
    running.stop();
}

pub(crate) fn a_verbose_run_tells_where_the_locks_are_and_what_happens(backend: Backend) {
    let world = World::on(backend);
    let done = world.run(["-v", "run", "lock", "--", "true"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""));
    assert!(
        done.stderr
            .contains(&format!("the locks are kept in {}", world.place())),
        "{done:?}"
    );
    assert!(done.stderr.contains("acquired"), "{done:?}");
}
