//! Passwords that are not in the address: in the environment, or in the user's password file.

use std::path::PathBuf;
use std::{env, fs};

use lock_transport::Endpoint;

/// The password for that server: `PGPASSWORD`, or what the password file says. As libpq, in that order.
pub(crate) fn find(server: &Endpoint, database: &str, user: &str) -> Option<String> {
    find_in(|name| env::var(name).ok(), server, database, user)
}

fn find_in(variable: impl Fn(&str) -> Option<String>, server: &Endpoint, database: &str, user: &str) -> Option<String> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(password) = set("PGPASSWORD") {
        return Some(password);
    }
    let beside_home = || Some(PathBuf::from(set("HOME")?).join(".pgpass"));
    let file = set("PGPASSFILE").map(PathBuf::from).or_else(beside_home)?;
    let text = fs::read_to_string(&file).ok()?;
    if !is_private(&file) {
        tracing::warn!(target: "fencelock", file = %file.display(), "others can read the password file, so it is not used; make it 0600");
        return None;
    }
    look(&text, [&server.host, &server.port.to_string(), database, user])
}

#[cfg(unix)]
fn is_private(file: &std::path::Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o077 == 0)
}

#[cfg(not(unix))]
fn is_private(_: &std::path::Path) -> bool {
    true
}

/// The password in the first line that fits.
fn look(text: &str, wanted: [&str; 4]) -> Option<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(fields).find_map(|fields| {
        let fits = |(field, wanted): (&String, &&str)| field == "*" || field == wanted;
        let all = fields.len() >= 5 && fields.iter().zip(&wanted).all(fits);
        all.then(|| fields[4].clone())
    })
}

/// The parts between colons; what follows a backslash is taken as it is.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        let taken = match letter {
            ':' => {
                fields.push(String::new());
                continue;
            }
            '\\' => letters.next(),
            other => Some(other),
        };
        if let Some(field) = fields.last_mut() {
            field.extend(taken);
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_fits_has_the_password() {
        let text = "# h:5432:d:u:no\nother:*:*:*:no\nh:5432:*:u:a\\:b\\\\c\n*:*:*:*:last\n";
        assert_eq!(look(text, ["h", "5432", "d", "u"]).as_deref(), Some("a:b\\c"));
        assert_eq!(look(text, ["h", "5433", "d", "u"]).as_deref(), Some("last"));
        assert_eq!(look("h:5432:d:u", ["h", "5432", "d", "u"]), None);
        assert_eq!(look("", ["h", "5432", "d", "u"]), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_password_is_found_in_the_environment_or_in_a_private_file() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join(".pgpass");
        fs::write(&file, "h:1:*:joe:in file\n").unwrap();
        let (home, server) = (home.path().to_str().unwrap(), Endpoint::new("h", 1));
        let find = |mode: u32, variables: &[(&str, &str)]| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let variable = |name: &str| variables.iter().find(|set| set.0 == name).map(|set| set.1.to_owned());
            find_in(variable, &server, "d", "joe")
        };
        let named = file.to_str().unwrap();
        assert_eq!(
            find(0o600, &[("HOME", home), ("PGPASSWORD", "set")]).as_deref(),
            Some("set")
        );
        for variables in [[("HOME", home)], [("PGPASSFILE", named)]] {
            assert_eq!(find(0o600, &variables).as_deref(), Some("in file"));
            assert_eq!(find(0o644, &variables), None);
        }
        assert_eq!(find(0o600, &[]), None);
    }
}
