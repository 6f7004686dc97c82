//! `holder`, `list`, `release` and `check`; help, completions and manual pages.

use std::fs;

use serde_json::Value;

use crate::world::{Done, SHORT_TTL, World, binary};

fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

#[test]
fn holders_are_shown_to_people_and_to_programs() {
    let world = World::new();
    let running = world.start(&["--label", "a \u{1b}[2J label"], "exec sleep 600");
    let (pid, place) = (running.fencelock().0, world.place());
    let done = world.run(["holder", "lock"]);
    assert_eq!(done.code, Some(0));
    assert!(
        done.stdout.starts_with("lock, held by ") && done.stdout.contains(&format!(":{pid} (a ")),
        "{done:?}"
    );
    assert!(
        done.stdout.contains(", token ") && done.stdout.ends_with(" unless renewed\n"),
        "{done:?}"
    );
    let holder = world.holder();
    let shown = [&holder["name"], &holder["pid"], &holder["mode"], &holder["max_holders"]];
    assert_eq!(shown, [&"lock".into(), &pid.into(), &"exclusive".into(), &Value::Null]);
    assert!(holder["token"].as_u64().unwrap() > 0 && holder["remaining_ms"].as_u64().unwrap() <= 30_000);

    let done = world.run(["list"]);
    assert_eq!(
        (done.code, done.stderr),
        (Some(0), format!("fencelock: 1 lock is held in {place}\n"))
    );
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(
        lines[0].starts_with("NAME  MODE ") && lines[1].starts_with("lock  exclusive  "),
        "{lines:?}"
    );
    // Nothing that a terminal would obey.
    assert!(
        lines.len() == 2 && lines[1].contains("[2J label") && !lines[1].contains('\u{1b}'),
        "{lines:?}"
    );
    let list = json(&world.run(["list", "lo", "--json"]));
    assert_eq!(
        (&list["location"], &list["locks"][0]["name"]),
        (&place.clone().into(), &"lock".into())
    );
    assert_eq!(
        json(&world.run(["list", "other/", "--json"]))["locks"],
        Value::Array(vec![])
    );
    let done = world.run(["list", "other/"]);
    assert_eq!(
        done.stderr,
        format!("fencelock: no locks are held under other/ in {place}\n")
    );
    let names = world.run(["list", "--names"]);
    assert_eq!((names.stdout.as_str(), names.stderr.as_str()), ("lock\n", ""));
    running.stop();
    let done = world.run(["holder", "lock", "--json"]);
    assert_eq!((done.code, json(&done)), (Some(1), Value::Null));
}

#[test]
fn looking_makes_no_file_and_an_address_that_is_read_only_takes_no_locks() {
    let world = World::new();
    for path in ["no/such/dir/x.db", "x.db"] {
        let url = format!("sqlite:{}", world.path(path).display());
        for args in [&["list"][..], &["holder", "lock"]] {
            let done = Done::of(world.fencelock().env("FENCELOCK_URL", &url).args(args));
            let line = done.one_line(78);
            assert!(line.contains(path) && line.contains("check the path"), "{line}");
        }
    }
    // The user's own file is made with the first lock.
    for (args, code) in [(&["list"][..], 0), (&["holder", "lock"], 1)] {
        let mut command = world.fencelock();
        command.env_remove("FENCELOCK_URL").env("HOME", world.dir());
        assert_eq!(Done::of(command.args(args)).code, Some(code));
    }
    assert_eq!(fs::read_dir(world.dir()).unwrap().count(), 0);

    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let url = format!("{}?mode=ro", world.url());
    let run = |args: &[&str]| Done::of(world.fencelock().env("FENCELOCK_URL", &url).args(args));
    for args in [&["run", "lock", "--", "true"][..], &["release", "--force", "lock"]] {
        assert!(run(args).one_line(78).contains("read-only"), "{args:?}");
    }
    assert_eq!(run(&["list"]).code, Some(0));
    assert_eq!(run(&["holder", "lock"]).code, Some(1));
}

#[test]
fn a_lock_is_taken_away_only_by_force() {
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    assert!(world.run(["release", "lock"]).one_line(64).contains("--force"));
    assert_eq!(world.run(["holder", "lock"]).code, Some(0));
    let done = world.run(["release", "--force", "lock", "--json"]);
    assert_eq!(
        (done.code, &json(&done)["pid"]),
        (Some(0), &running.fencelock().0.into())
    );
    let done = world.run(["release", "--force", "lock"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "lock is free\n"));
    assert_eq!(running.end().code, Some(76));
}

#[test]
fn a_check_tries_everything_leaves_nothing_and_says_what_is_refused() {
    let world = World::new();
    let done = world.run(["check"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
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
    ];
    for step in steps {
        assert!(done.stdout.contains(&format!("  {step:17} ok ")), "{step}: {done:?}");
    }
    let report = json(&world.run(["check", "--json"]));
    assert_eq!(
        (&report["ok"], &report["version"]),
        (&true.into(), &env!("CARGO_PKG_VERSION").into())
    );
    assert_eq!(report["steps"].as_array().unwrap().len(), steps.len() + 1);
    assert!(
        report["shared"].is_boolean() && report["warnings"].is_array(),
        "{report}"
    );
    assert_eq!(world.run(["list"]).stdout, "");

    fs::create_dir(world.path("folder")).unwrap();
    let url = format!("sqlite:{}", world.path("folder").display());
    let done = world.run(["check", "--url", &url]);
    assert!(
        done.stdout.contains("refused") && done.stdout.contains("is a directory"),
        "{done:?}"
    );
    let done = world.run(["check", "--json", "--url", &url]);
    assert_eq!((done.code, &json(&done)["ok"]), (Some(78), &false.into()));
}

#[test]
fn every_command_has_help_with_an_example_and_a_manual_page() {
    let world = World::new();
    for command in ["run", "holder", "list", "release", "check", "completions", "man"] {
        for help in ["-h", "--help"] {
            let done = world.run([command, help]);
            assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{command}");
            assert!(done.stdout.contains(&format!("\n  fencelock {command}")), "{done:?}");
        }
        let page = world.run(["man", command]);
        assert!(page.stdout.contains(&format!(".TH fencelock-{command} 1")), "{page:?}");
    }
    assert!(world.run(["--help"]).stdout.contains("FENCELOCK_URL"));
    assert!(world.run(["man"]).stdout.contains(".TH fencelock 1"));
    let version = world.run(["--version"]);
    assert_eq!(version.stdout, concat!("fencelock ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn completions_are_printed_and_bash_knows_held_names_and_the_command_after_the_dashes() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = world.run(["completions", shell]);
        assert!(done.code == Some(0) && done.stdout.contains("fencelock"), "{shell}");
        assert!(done.stdout.contains("holder"), "{shell}");
    }
    let running = world.start(&[], "exec sleep 600");
    fs::write(world.path("a-file"), "").unwrap();
    // As bash calls the function: words are parted at colons too.
    let complete = |line: &[&str]| {
        let script = r#"source <("$0" completions bash)
            COMP_WORDS=("$0" "${@:2}"); COMP_CWORD=$(($# - 1))
            $(complete -p fencelock | sed 's/.*-F \([^ ]*\).*/\1/') "$0" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut bash = std::process::Command::new("bash");
        bash.args(["--norc", "-c", script, binary()]).args(line);
        bash.env("FENCELOCK_URL", world.url()).current_dir(world.dir());
        let done = Done::of(&mut bash);
        assert_eq!(done.stderr, "", "{line:?}");
        done.stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for command in ["run", "holder", "list", "release"] {
        assert_eq!(complete(&["fencelock", command, "lo"]), ["lock"], "{command}");
        assert_eq!(complete(&["fencelock", command, "x"]), [""], "{command}");
        assert!(
            complete(&["fencelock", command, "--u"]).contains(&"--url".to_owned()),
            "{command}"
        );
    }
    for option in ["--ttl", "--timeout", "--max-hold", "--min-hold"] {
        assert_eq!(
            complete(&["fencelock", "run", option, "5s", "lo"]),
            ["lock"],
            "{option}"
        );
    }
    let elsewhere = complete(&["fencelock", "--url", "sqlite", ":", "elsewhere.db", "holder", ""]);
    assert_eq!(elsewhere, [""]);
    for (line, word) in [
        (&["fencelock", "run", "lock", "--", "sle"][..], "sleep"),
        (&["fencelock", "run", "lock", "--", "cat", "-n", "a-f"], "a-file"),
        (&["fencelock", "run", "--", "-name", "--", "sle"], "sleep"),
        (&["fencelock", "hol"], "holder"),
    ] {
        let found = complete(line);
        assert!(found.iter().any(|found| found == word), "{line:?}: {found:?}");
    }
    running.stop();
}

#[cfg(feature = "postgres")]
#[test]
fn the_schema_is_printed_with_the_rights_of_a_role_if_it_is_named() {
    let world = World::new();
    let done = world.run(["schema", "postgres"]);
    assert!(
        done.stdout.starts_with("CREATE SCHEMA IF NOT EXISTS \"fencelock\";\n"),
        "{done:?}"
    );
    assert!(!done.stdout.contains("GRANT"), "{done:?}");
    let done = world.run(["schema", "postgres", "--role", "a\"b", "--schema", "shop"]);
    assert!(
        done.stdout.contains("GRANT USAGE ON SCHEMA \"shop\" TO \"a\"\"b\";"),
        "{done:?}"
    );
    let done = world.run(["schema", "postgres", "--schema", ""]);
    assert!(done.one_line(64).contains("1 to 63 bytes"), "{done:?}");
}
