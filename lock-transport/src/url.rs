//! Addresses: `SCHEME://USER:PASSWORD@HOST:PORT,HOST/PATH?PARAMETER=VALUE&...`.
//!
//! No error shows any of an address but the names of parameters, as the rest may be secret, and so may be what an unescaped character in a
//! password makes of it.

use std::fmt;
use std::time::Duration;

use lock_core::LockError;
use percent_encoding::percent_decode_str;

use crate::{Endpoint, Secret};

/// What the addresses of a product look like.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The product, as errors name it: `the Redis server`.
    pub product: &'static str,
    /// The schemes, and whether each means TLS.
    pub schemes: &'static [(&'static str, bool)],
    /// An example, for errors.
    pub form: &'static str,
    /// The port of a host without one.
    pub port: u16,
}

/// An address that was read.
#[derive(Clone, Debug)]
pub struct Address {
    /// Whether the scheme means TLS.
    pub tls: bool,
    /// The user, decoded, if there is one that is not empty.
    pub user: Option<String>,
    /// The password, decoded, if there is a colon behind the user.
    pub password: Option<Secret>,
    /// At least one.
    pub hosts: Vec<Endpoint>,
    /// What follows the first `/`, not decoded.
    pub path: String,
    /// What follows the first `?`.
    pub params: Params,
}

const SPECIAL: &str = "in a user or password, write # as %23, / as %2F, @ as %40, : as %3A, ? as %3F";

/// Reads an address.
///
/// # Errors
///
/// [`LockError::Configuration`] if it is none of this product.
pub fn parse(text: &str, spec: &Spec) -> Result<Address, LockError> {
    let Spec { product, form, .. } = *spec;
    let wrong = |why: String| wrong(product, &why);
    let known = text.split_once("://").and_then(|(scheme, rest)| {
        let known = spec.schemes.iter().find(|(known, _)| *known == scheme);
        known.map(|&(_, tls)| (tls, rest))
    });
    let scheme = spec.schemes[0].0;
    let (tls, rest) = known.ok_or_else(|| wrong(format!("must start with {scheme}:// or the like, as in {form}")))?;
    if rest.contains('#') {
        return Err(wrong(format!("holds a #; {SPECIAL}")));
    }
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    if path.contains('@') {
        return Err(wrong(format!("has a / before an @; {SPECIAL}")));
    }
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = login
        .split_once(':')
        .map_or((login, None), |(user, password)| (user, Some(password)));
    let hosts = hosts.split(',').map(|host| {
        Endpoint::parse(host, spec.port).ok_or_else(|| match host {
            "" => wrong(format!("names no host, or none beside a comma; write it as in {form}")),
            _ => wrong(format!(
                "has a host or port that cannot be read; write it as in {form}; {SPECIAL}"
            )),
        })
    });
    Ok(Address {
        tls,
        user: Some(decoded(product, user)?).filter(|user| !user.is_empty()),
        password: password
            .map(|password| decoded(product, password))
            .transpose()?
            .map(Secret::new),
        hosts: hosts.collect::<Result<_, _>>()?,
        path: path.to_owned(),
        params: Params::parse(product, query)?,
    })
}

/// The parameters of an address. Each is taken once; what is left in the end is unknown.
///
/// Each method fails with [`LockError::Configuration`] if the parameter is given twice or its value is wrong.
#[derive(Clone)]
pub struct Params {
    product: &'static str,
    given: Vec<(String, String)>,
}

impl Params {
    /// Reads `NAME=VALUE&NAME=VALUE`.
    pub fn parse(product: &'static str, query: &str) -> Result<Self, LockError> {
        let mut given = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            given.push((name.to_owned(), decoded(product, value)?));
        }
        Ok(Self { product, given })
    }

    /// Takes the value of that name.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, LockError> {
        let mut found: Vec<_> = self.given.extract_if(.., |(given, _)| given == name).collect();
        match found.len() {
            0 | 1 => Ok(found.pop().map(|(_, value)| value)),
            _ => Err(self.wrong(format_args!("gives {name} twice; give it once"))),
        }
    }

    /// Takes a time above zero, such as `example`.
    pub fn duration(&mut self, name: &str, example: &str) -> Result<Option<Duration>, LockError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        match humantime::parse_duration(&value) {
            Ok(time) if !time.is_zero() => Ok(Some(time)),
            _ => Err(self.wrong(format!("has a wrong {name}; give a time above zero, such as {example}"))),
        }
    }

    /// Takes `true` or `false`.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, LockError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        let wrong = |_| self.wrong(format_args!("has a wrong {name}; give true or false"));
        value.parse().map(Some).map_err(wrong)
    }

    /// Takes `password_file`, which stands in for the password before the host.
    pub fn password(&mut self, password: Option<Secret>) -> Result<Option<Secret>, LockError> {
        match (password, self.text("password_file")?) {
            (Some(_), Some(_)) => Err(self.wrong("gives a password and password_file; give one of them")),
            (password, file) => Ok(password.or(file.map(Secret::file))),
        }
    }

    /// Fails if a parameter is left, which is not shown: a password with a `&` in it would look like one.
    pub fn finish(self, known: &str) -> Result<(), LockError> {
        match self.given.is_empty() {
            true => Ok(()),
            false => Err(self.wrong(format_args!("has an unknown parameter; known are {known}"))),
        }
    }

    /// The error for an address that `why` says what is wrong with.
    pub fn wrong(&self, why: impl fmt::Display) -> LockError {
        wrong(self.product, &why)
    }
}

/// Shows the names of parameters only as a count: what is written as a name may be a part of a password.
impl fmt::Debug for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Params")
            .field("given", &self.given.len())
            .finish_non_exhaustive()
    }
}

fn decoded(product: &str, text: &str) -> Result<String, LockError> {
    let decoded = percent_decode_str(text).decode_utf8().map(String::from);
    decoded.map_err(|_| wrong(product, &"holds bytes that are not UTF-8 after decoding"))
}

fn wrong(product: &str, why: &dyn fmt::Display) -> LockError {
    LockError::configuration(format!("the address of {product} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pin, TlsFiles};

    const SPEC: Spec = Spec {
        product: "the server",
        schemes: &[("some", false), ("somes", true)],
        form: "some://localhost:7",
        port: 7,
    };

    #[test]
    fn an_address_gives_hosts_login_path_and_parameters() {
        let pin = format!("sha256:0A:ff{}", ":00".repeat(30));
        let hosts = "a,b.example:1,[::1]:2,10.0.0.1";
        let text = format!("somes://j%C3%B6e:p%40ss%3A@{hosts}/x/y?time=500ms&flag=true&text=a%20b&ca=/c&pin={pin}");
        let mut address = parse(&text, &SPEC).unwrap();
        assert_eq!((address.tls, &*address.path), (true, "x/y"));
        assert_eq!(address.user.as_deref(), Some("j\u{f6}e"));
        assert_eq!(address.password, Some("p@ss:".into()));
        let hosts: Vec<_> = address.hosts.iter().map(Endpoint::to_string).collect();
        assert_eq!(hosts, ["a:7", "b.example:1", "[::1]:2", "10.0.0.1:7"]);
        assert!(!format!("{address:?}").contains("p@ss"));
        let params = &mut address.params;
        assert_eq!(params.duration("time", "").unwrap(), Some(Duration::from_millis(500)));
        assert_eq!(params.flag("flag").unwrap(), Some(true));
        assert_eq!(params.text("text").unwrap().as_deref(), Some("a b"));
        assert_eq!(params.text("text").unwrap(), None);
        let files = TlsFiles::from_params(params).unwrap();
        assert_eq!(
            (files.ca, files.pin.unwrap().0[..3].to_vec()),
            (Some("/c".into()), vec![10, 255, 0])
        );
        assert_eq!(Pin::parse(&pin.replace("A:f", "af")), files.pin);
        address.params.finish("").unwrap();
        for (text, user, password) in [
            ("some://h", None, None),
            ("some://u@h/", Some("u"), None),
            ("some://:p@h", None, Some("p")),
        ] {
            let address = parse(text, &SPEC).unwrap();
            assert_eq!(
                (address.user.as_deref(), address.password),
                (user, password.map(Secret::new)),
                "{text}"
            );
        }
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_to_do_and_shows_no_secret() {
        let read = |text: &str| {
            let mut address = parse(text, &SPEC)?;
            address.params.duration("time", "5s")?;
            address.params.flag("flag")?;
            address.params.password(address.password)?;
            TlsFiles::from_params(&mut address.params)?;
            address.params.finish("time and flag")
        };
        for (text, says) in [
            (
                "hunter2://joe:hunter2@h",
                "some:// or the like, as in some://localhost:7",
            ),
            ("some:hunter2", "must start with"),
            ("some://joe:hunter2@", "names no host"),
            ("some://joe:hunter2@a,,b", "names no host"),
            ("some://joe:hunter2@h:hunter2", "cannot be read"),
            ("some://joe:hunter2?x@h", "? as %3F"),
            ("some://joe:1/hunter2@h", "/ as %2F"),
            ("some://joe:hunter2#@h", "# as %23"),
            ("some://h?%ff=1&x=%ff", "UTF-8"),
            ("some://h?hunter2=hunter2&hunter2", "known are time and flag"),
            ("some://h?time=1s&time=hunter2", "gives time twice"),
            ("some://h?time=hunter2", "such as 5s"),
            ("some://h?time=0s", "above zero"),
            ("some://h?flag=hunter2", "true or false"),
            ("some://h?cert=hunter2", "private key"),
            ("some://h?pin=sha256:hunter2", "fingerprint"),
            (&*format!("some://h?pin=sha256:{}", "\u{e9}".repeat(32)), "fingerprint"),
            ("some://u:hunter2@h?password_file=hunter2", "give one of them"),
        ] {
            let error = read(text).unwrap_err();
            let said = format!("{error:#}");
            assert!(matches!(error, LockError::Configuration { .. }), "{text}: {error:?}");
            assert!(!format!("{error:?} {said}").contains("hunter2"), "{text}: {error:?}");
            assert!(
                said.starts_with("the address of the server ") && said.contains(says),
                "{text}: {said}"
            );
        }
    }
}
