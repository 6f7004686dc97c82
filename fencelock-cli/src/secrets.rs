//! Addresses as people may see them.

/// Takes users, passwords and parameters out of every address in `text`.
pub(crate) fn without_secrets(text: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || "'\"`<>".contains(c);
    let words = text.split_inclusive(is_end).map(|word| {
        let end = word.strip_suffix(is_end).map_or(word.len(), str::len);
        let (address, end) = word.split_at(end);
        address_without_secrets(address) + end
    });
    words.collect()
}

/// Takes the same out of what is an address as a whole, or was meant to be one.
pub(crate) fn address_without_secrets(address: &str) -> String {
    let Some(scheme_ends) = address.find([':', '=']) else {
        return address.to_owned();
    };
    let (scheme, rest) = (&address[..scheme_ends], &address[scheme_ends + 1..]);
    if address[scheme_ends..].starts_with('=') {
        // As libpq has it, if it is not read from an address.
        return match scheme.to_ascii_lowercase().contains("password") {
            true => format!("{scheme}=..."),
            false => address.to_owned(),
        };
    }
    let slashes = if rest.starts_with("//") { "//" } else { "" };
    let (rest, query) = match rest.split_once('?') {
        // A password with a ? in it.
        Some((rest, query)) if !slashes.is_empty() && query.contains('@') && !rest.contains('@') => {
            return format!("{scheme}:{slashes}...");
        }
        Some((rest, _)) => (rest, "?..."),
        None => (rest, ""),
    };
    match rest.rsplit_once('@') {
        // A path may hold an @.
        Some((_, host)) if scheme != "sqlite" || !slashes.is_empty() => {
            format!("{scheme}:{slashes}...@{host}{query}")
        }
        _ => format!("{scheme}:{rest}{query}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_users_passwords_and_parameters_however_they_are_written() {
        for (text, clean) in [
            ("redis://joe:hunter2@host:6379/0", "redis://...@host:6379/0"),
            ("postgres://host/d?password=hunter2&x=1", "postgres://host/d?..."),
            ("'etcd://a:hun@ter2@h?k=v' is", "'etcd://...@h?...' is"),
            ("two a://x:y@b c://d:e@f", "two a://...@b c://...@f"),
            ("sqlite:///var/lib/locks.db", "sqlite:///var/lib/locks.db"),
            ("redis+unix:/r.sock?password=hunter2", "redis+unix:/r.sock?..."),
            ("redis:joe:hunter2@host/0", "redis:...@host/0"),
            ("joe:hunter2@host is no command", "joe:...@host is no command"),
            ("sqlite:/home/joe@work/locks.db", "sqlite:/home/joe@work/locks.db"),
            ("nothing here: or here", "nothing here: or here"),
            ("'postgres://joe:hunter2?x@host/shop'", "'postgres://...'"),
            ("'host=h password=hunter2 dbname=d'", "'host=h password=... dbname=d'"),
        ] {
            assert_eq!(without_secrets(text), clean);
        }
        // Only an address as a whole may hold blanks.
        assert_eq!(address_without_secrets("redis://joe:hun ter2@host"), "redis://...@host");
        let path = "sqlite:/srv/two words.db";
        assert_eq!(address_without_secrets(path), path);
    }
}
